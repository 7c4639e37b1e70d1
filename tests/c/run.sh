#!/bin/sh
# Runs the test programs given, all of them, and ends with one line for all. Exit code 0 only if every test of every one passed.
passed=0 failed=0
for program in "$@"; do
    report=$("$program")
    code=$?
    echo "$(basename "$(dirname "$program")"): $report"
    counts=$(echo "$report" | sed -n 's/.*: \([0-9]*\) passed, \([0-9]*\) failed$/\1 \2/p')
    set -- ${counts:-0 1}
    [ "$code" -ne 0 ] && [ "$2" -eq 0 ] && set -- "$1" 1
    passed=$((passed + $1)) failed=$((failed + $2))
done
echo "$passed passed, $failed failed"
[ "$failed" -eq 0 ] && [ "$passed" -gt 0 ]
