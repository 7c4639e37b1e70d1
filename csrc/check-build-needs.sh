#!/bin/sh
# Checks that everything that the build needs is installed. Prints one line for each missing thing, with its package. Builds nothing.
#
#   csrc/check-build-needs.sh PYTHON        exits with 0 and prints nothing, or exits with 1; uses $CC if set, as setuptools does
#
# `make` calls this before it makes the virtual environment. build_engine.py checks the compiler's flags later.
set -u
required=$(sed -n 's/^requires-python = ">=\([0-9.]*\)"$/\1/p' "$(dirname "$0")/../pyproject.toml")
work=$(mktemp -d) || exit 1
trap 'rm -rf "$work"' EXIT
trap 'exit 1' HUP INT TERM
lines='' debian='' fedora='' compiler=''

# missing WHAT WHY [DEBIAN'S PACKAGE [FEDORA'S]]
missing() {
    lines="$lines  missing: $1, $2${3:+; package $3}
"
    debian="$debian${3:+ $3}" fedora="$fedora${4:+ $4}"
}

# Prints the first line of the compiler's output that reports an error.
said() { { grep -E 'error|cannot' "$work/said" || cat "$work/said"; } | sed "s|$work/||g; q"; }

# header FILE WHY DEBIAN'S-PACKAGE FEDORA'S-PACKAGE [FOLDER...]: checks a header; add a line below for each further one.
header() {
    file=$1 why=$2 for_debian=$3 for_fedora=$4 found=''
    shift 4
    if [ -n "$compiler" ]; then
        for folder in "$@"; do set -- "$@" "-I$folder"; shift; done
        printf '#if !__has_include(<%s>)\n#error the header is missing\n#endif\n' "$file" >"$work/header.c"
        $compiler "$@" -E -o "$work/header.i" "$work/header.c" >"$work/said" 2>&1 && found=1
    else
        for folder in "$@" /usr/include; do [ -e "$folder/$file" ] && found=1; done
    fi
    [ -n "$found" ] || missing "$file" "$why" "$for_debian" "$for_fedora"
}

# Works with any Python, also Python 2. Prints: version; whether it is too old; whether it is free-threaded; why it cannot make
# environments; why it cannot fetch packages; its compiler; where its headers are; the prefix of its packages' names ("" if it
# was not installed from a package).
facts=$("$@" -c '
import os, sys, sysconfig
def refusal(*modules):
    try:
        for module in modules:
            __import__(module)
    except ImportError as error:
        return str(error)
    return ""
name = "python%d.%d" % tuple(sys.version_info[:2])
real = os.path.realpath(sys.executable)
system = "python3" if real == os.path.realpath("/usr/bin/python3") else name
print("%d.%d.%d" % tuple(sys.version_info[:3]))
print("old" if sys.version_info < tuple(int(part) for part in "'"$required"'".split(".")) else "")
print("free-threaded" if sysconfig.get_config_var("Py_GIL_DISABLED") else "")
print(refusal("venv", "zlib", "ensurepip"))
print(refusal("ssl"))
print(os.environ.get("CC") or sysconfig.get_config_var("CC") or "cc")
print(sysconfig.get_path("include"))
print(sysconfig.get_path("platinclude"))
print(system if os.path.dirname(real) == "/usr/bin" else "")
' 2>"$work/said")
runs=$?
{
    read -r version
    read -r old
    read -r free_threaded
    read -r no_venv
    read -r no_ssl
    read -r cc
    read -r include
    read -r platinclude
    read -r package
} <<END
$facts
END

if [ $runs != 0 ]; then
    version='' cc=${CC:-cc}
    case $1 in */*) package='' ;; *) package=$1 ;; esac
    if command -v "$1" >/dev/null 2>&1; then why="$* does not run: $(tail -n 1 "$work/said")"; else why="there is no $1"; fi
    missing "Python $required or newer" "needed to run everything: $why" "$package" "$package"
    missing "its venv" "needed to install packages" "${package:+$package-venv}"
elif [ -n "$old" ]; then
    missing "Python $required or newer" "needed to run everything: $* is $version; name a newer Python with make PYTHON=..."
elif [ -n "$free_threaded" ]; then
    missing "an ordinary Python" "$* is free-threaded, which is not supported yet: its headers refuse the limited API,\
 for which the engine's module is compiled; name another Python with make PYTHON=..."
else
    [ -z "$no_venv" ] || missing "venv of $*" "needed to install packages: $no_venv" "${package:+$package-venv}"
    [ -z "$no_ssl" ] || missing "ssl of $*" "needed to fetch packages over TLS: $no_ssl; that Python was built without libssl's headers"
fi

# Words of $cc are split on purpose: it may be "gcc -pthread".
if ! command -v "${cc%% *}" >/dev/null 2>&1; then
    hint=''
    [ "${cc%% *}" = cc ] || ! command -v cc >/dev/null 2>&1 || hint='; make CC=cc uses the compiler that is installed'
    missing "C compiler ${cc%% *}" "needed to compile the engine$hint" gcc gcc
elif : >"$work/empty.c"; ! $cc -E -o "$work/empty.i" "$work/empty.c" >"$work/said" 2>&1; then
    missing "C compiler ${cc%% *}" "which does not work here: $(said)" gcc gcc
else
    compiler=$cc
fi

header stdio.h "of the C library's headers, for the engine" libc6-dev glibc-devel
header openssl/ssl.h "of OpenSSL's headers, for TLS in the engine" libssl-dev openssl-devel
if [ -z "$version" ]; then
    missing Python.h "of its headers, for the engine's module" "${package:+$package-dev}" "${package:+$package-devel}"
elif [ -z "$old$free_threaded" ]; then
    whose=''
    [ -n "$package" ] || whose=": it must lie in $include"
    header Python.h "of the headers of $* ($version), for the engine's module$whose" "${package:+$package-dev}" "${package:+$package-devel}" \
        "$include" "$platinclude"
fi

# Nothing is missing: check that a module can be compiled and linked.
if [ -z "$lines" ]; then
    printf '%s\n' '#include <Python.h>' '#include <openssl/ssl.h>' '#if OPENSSL_VERSION_NUMBER < 0x30000000L' '#error OpenSSL 3 is needed' \
        '#endif' 'int smb_probe(void) { return PY_MAJOR_VERSION + (TLS_method() != 0); }' >"$work/probe.c"
    $compiler -std=c11 -fPIC -shared -pthread "-I$include" "-I$platinclude" -o "$work/probe.so" "$work/probe.c" -lssl -lcrypto \
        >"$work/said" 2>&1 || missing "a C compiler that works" "${cc%% *} cannot build a module for $*: $(said)"
fi

[ -n "$lines" ] || exit 0
{
    echo "Soft Memory Box cannot be built here yet. Nothing was installed."
    printf %s "$lines"
    [ -z "$debian" ] || echo "on Debian and Ubuntu: apt-get install$debian"
    [ -z "$fedora" ] || echo "on Fedora: dnf install$fedora"
} >&2
exit 1
