#!/bin/sh
# Is all here that building takes? Says everything that is missing, a line each, with its package, and makes nothing.
#
#   csrc/check-build-needs.sh PYTHON        0 and silent, or 1; $CC is the compiler, if set, as for setuptools
#
# `make` calls it before it makes the virtual environment. What the build looks for later is in build_engine.py.
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

# The compiler's message: the first line that reports an error.
said() { { grep -E 'error|cannot' "$work/said" || cat "$work/said"; } | sed "s|$work/||g; q"; }

# header FILE WHY DEBIAN'S FEDORA'S [FOLDER...]: one more header that the build needs is one more line below.
header() {
    file=$1 why=$2 for_debian=$3 for_fedora=$4 found=''
    shift 4
    if [ -n "$compiler" ]; then
        for folder in "$@"; do set -- "$@" "-I$folder"; shift; done
        printf '#if !__has_include(<%s>)\n#error it is not here\n#endif\n' "$file" >"$work/header.c"
        $compiler "$@" -E -o "$work/header.i" "$work/header.c" >"$work/said" 2>&1 && found=1
    else
        for folder in "$@" /usr/include; do [ -e "$folder/$file" ] && found=1; done
    fi
    [ -n "$found" ] || missing "$file" "$why" "$for_debian" "$for_fedora"
}

# Of any Python, Python 2 too: version, whether it is old, free-threaded, what keeps it from making environments and from
# fetching packages, its compiler, where its headers are, the start of its packages' names ("" where it is no package).
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
    missing "Python $required or newer" "which everything runs in: $why" "$package" "$package"
    missing "its venv" "which packages are installed into" "${package:+$package-venv}"
elif [ -n "$old" ]; then
    missing "Python $required or newer" "which everything runs in: $* is $version; name a newer one with make PYTHON=..."
elif [ -n "$free_threaded" ]; then
    missing "an ordinary Python" "$* is free-threaded, which is not supported yet: its headers refuse the limited API,\
 which the engine's module is compiled for; name another with make PYTHON=..."
else
    [ -z "$no_venv" ] || missing "venv of $*" "which packages are installed into: $no_venv" "${package:+$package-venv}"
    [ -z "$no_ssl" ] || missing "ssl of $*" "as packages come over TLS: $no_ssl; that Python was built without libssl's headers"
fi

# Words of $cc are split on purpose: it may be "gcc -pthread".
if ! command -v "${cc%% *}" >/dev/null 2>&1; then
    hint=''
    [ "${cc%% *}" = cc ] || ! command -v cc >/dev/null 2>&1 || hint='; make CC=cc takes the one that is here'
    missing "C compiler ${cc%% *}" "which the engine is compiled with$hint" gcc gcc
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
    [ -n "$package" ] || whose=": it belongs into $include"
    header Python.h "of the headers of $* ($version), for the engine's module$whose" "${package:+$package-dev}" "${package:+$package-devel}" \
        "$include" "$platinclude"
fi

# All there: do they work together?
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
