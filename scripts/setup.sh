# Sourced by the other scripts: go to the repository's root and have .venv ready there with the extras in $1.
# A second run is quick: nothing is installed unless pyproject.toml or constraints.txt changed.
cd "$(dirname "${BASH_SOURCE[0]}")/.."

say() { printf '\033[1m==> %s\033[0m\n' "$*" >&2; }

ready() {
  local extras=$1 python=${PYTHON:-python3} stamp=.venv/.outpace-${1:-core}
  "$python" -c 'import sys; sys.exit(sys.version_info < (3, 11))' ||
    { echo "Outpace needs Python 3.11 or newer; set PYTHON to one" >&2; exit 1; }
  [ -x .venv/bin/python ] || { say "making .venv"; "$python" -m venv .venv; }
  local want; want=$(cat pyproject.toml constraints.txt | cksum)
  if [ "$(cat "$stamp" 2>/dev/null)" != "$want" ]; then
    say "installing Outpace${extras:+ [$extras]} and what it needs (minutes the first time)"
    .venv/bin/python -m pip install --quiet --disable-pip-version-check -c constraints.txt -e ".${extras:+[$extras]}"
    echo "$want" >"$stamp"
  fi
  PATH="$PWD/.venv/bin:$PATH"
}
