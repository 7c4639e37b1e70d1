#!/bin/sh
# Installs Python packages as `pip install` does, with uv, which takes a fifth of the processor time because it compiles no
# module that nobody imports. uv reads none of pip's settings, so the script passes on those that say where packages are. If
# there is no uv for this machine, or uv fails, pip installs the packages.
#
#   tests/support/install.sh ENVIRONMENT ARGUMENT-OF-PIP-INSTALL...
set -u
python=$1/bin/python uv=$1/bin/uv
shift
pip() { "$python" -m pip --disable-pip-version-check "$@"; }

# Prints the options for uv, one a line, from lines such as global.find-links='/wheels https://host/wheels'.
places() {
    pip config list | sed -n "s/^[^=]*\.\(index-url\|extra-index-url\|find-links\)='\(.*\)'\$/\1 \2/p" | sed 's/\\n/ /g' |
        while read -r option values; do
            for value in $values; do printf '%s\n' "--$option=$value"; done
        done
}

by_uv() {
    [ -x "$uv" ] || pip install --quiet uv || return
    # shellcheck disable=SC2046 # one word for each option
    UV_CONSTRAINT="${PIP_CONSTRAINT:-}" UV_BUILD_CONSTRAINT="${PIP_BUILD_CONSTRAINT:-}" "$uv" --quiet --system-certs pip install \
        --python "$python" --index-strategy unsafe-best-match $(places) "$@"
}

by_uv "$@" || { echo "uv could not install this; pip tries it" >&2 && pip install --quiet "$@"; }
