#!/bin/sh
# Runs all given test programs and prints one line with the totals. Exits with 0 only if every test of every program passed.
# Runs three programs at once on two processors, because most of them wait for sockets and for processes that they kill. JOBS=1:
# one after the other.
reports=$(mktemp -d)
trap 'rm -rf "$reports"' EXIT
# shellcheck disable=SC2016 # the inner shell expands these
printf '%s\n' "$@" | REPORTS="$reports" xargs -P "${JOBS:-$(($(nproc) * 3 / 2))}" -I {} sh -c '
    build=$(basename "$(dirname "$1")") name=$(basename "$1")
    "$1" >"$REPORTS/$build.$name" 2>"$REPORTS/$build.$name.errors"
    echo $? >"$REPORTS/$build.$name.code"
    cat "$REPORTS/$build.$name.errors" >&2
    echo "$build: $(cat "$REPORTS/$build.$name")"' sh {}
passed=0 failed=0
for program in "$@"; do
    report="$reports/$(basename "$(dirname "$program")").$(basename "$program")"
    code=$(cat "$report.code")
    counts=$(sed -n 's/.*: \([0-9]*\) passed, \([0-9]*\) failed$/\1 \2/p' "$report")
    set -- ${counts:-0 1}
    [ "${code:-1}" -ne 0 ] && [ "$2" -eq 0 ] && set -- "$1" 1
    passed=$((passed + $1)) failed=$((failed + $2))
done
echo "$passed passed, $failed failed"
[ "$failed" -eq 0 ] && [ "$passed" -gt 0 ]
