#!/usr/bin/env bash
# One script for a day with a GPU: what runs here, whether it says what the CPU says, and how long it takes.
#
#   tests/gpu/run.sh [--wheels DIR] [--backends "cuda tensorrt tensorrt-rtx"] [--precisions "fp16 int4"]
#                    [--shapes "0.5B 1.5B 7B 32B"] [--seconds 0.3] [--limit 450] [--work DIR]
#
# Needs this checkout and a Python ($PYTHON, else python3) that has what semspec's extra `export` needs, an engine, and
# for TensorRT cuda-bindings. --wheels: a folder of wheels that come before what is installed; nothing is downloaded.
# --seconds: to spend on each figure. --limit: seconds for all of it, shared out; what does not fit is not begun, and
# that is said: more for a device that compiles slowly.
# --work: where temporary files go, up to twice the largest model's weights. Backend `cpu` is there to try the script.
#
# Every step is a process of its own: one that fails, dies or hangs costs its own figures and no others. stderr tells
# what happens; stdout gets tables and, last, one JSON line. Exit status 0, also where there is no GPU; 1: a step broke,
# or a backend disagrees with the CPU; 2: usage.
set -u

wheels='' backends='cuda tensorrt tensorrt-rtx' precisions='fp16 int4' shapes='0.5B 1.5B 7B 32B'
seconds=0.3 limit=450 work=${TMPDIR:-/tmp}
python=${PYTHON:-python3}
root=$(cd "$(dirname "$0")/../.." && pwd) || exit 1
child=''
UNBEGUN=99 # exit status noted for a step that there was no time for
LEAST=10   # seconds without which none is begun

usage() {
  echo "run.sh: $1" >&2
  sed -n '4,5s/^#  *//p' "$0" >&2
  exit 2
}

note() {
  echo "[$SECONDS s] $*" >&2
}

# shellcheck disable=SC2329 # a trap invokes it
stop() {
  [ -z "$child" ] || { kill "$child" && wait "$child"; } 2>/dev/null
  exit 130
}

while [ $# -gt 0 ]; do
  case $1 in
    --wheels | --backends | --precisions | --shapes | --seconds | --limit | --work)
      [ $# -ge 2 ] || usage "$1 needs a value"
      printf -v "${1#--}" '%s' "$2"
      shift 2
      ;;
    *) usage "unknown argument $1" ;;
  esac
done
case $limit in '' | *[!0-9]*) usage "--limit must be a whole number of seconds, got '$limit'" ;; esac
limit=$((10#$limit))
[ "$limit" -ge 30 ] || usage "--limit must be at least 30 seconds, got $limit"
[ -z "$wheels" ] || [ -d "$wheels" ] || usage "--wheels must be a folder, got '$wheels'"
[ -d "$work" ] || usage "--work must be a folder, got '$work'"
[ -z "$wheels" ] || wheels=$(cd "$wheels" && pwd) || exit 1
read -ra asked_backends <<<"$backends"
read -ra asked_precisions <<<"$precisions"
read -ra asked_shapes <<<"$shapes"
share=$((limit / 15)) # steps get so many of these

work=$(mktemp -d "$(cd "$work" && pwd)/semspec-gpu.XXXXXX") || exit 1
trap 'rm -rf "$work"' EXIT
trap stop INT TERM
findings=$work/findings
: >"$findings"
cd "$work" || exit 1

# The checkout as a package, without installing it: links, and its version.
version=$(sed -n 's/^version = "\(.*\)"$/\1/p' "$root/pyproject.toml")
mkdir -p "checkout/semspec" "checkout/semspec-$version.dist-info"
printf 'Metadata-Version: 2.1\nName: semspec\nVersion: %s\n' "$version" >"checkout/semspec-$version.dist-info/METADATA"
ln -s "$root"/runtime/api/*.py checkout/semspec/
for layer in models runtime export calibration; do ln -s "$root/$layer" "checkout/semspec/$layer"; done
path=$work/checkout:$root/tests

# put FOLDER NAME..: packages from --wheels, into a folder of their own
put() {
  local folder=$1
  shift
  "$python" -m pip install --quiet --disable-pip-version-check --no-index --no-deps --no-compile \
    --find-links "$wheels" --target "$folder" "$@" >&2
}

if [ -n "$wheels" ]; then
  mapfile -t names < <(find "$wheels" -maxdepth 1 -name '*.whl' -exec basename {} \; | sed 's/-.*//' | sort -u)
  note "installing ${#names[@]} packages from $wheels"
  if [ ${#names[@]} -gt 0 ] && put "$work/packages" "${names[@]}"; then
    path=$path:$work/packages
  else # each in a folder of its own, for pip does not add to one
    rm -rf "$work/packages"
    for name in "${names[@]}"; do
      if put "$work/packages/$name" "$name"; then path=$path:$work/packages/$name; else note "$name is left out"; fi
    done
  fi
fi
export PYTHONPATH=$path${PYTHONPATH:+:$PYTHONPATH} SEMSPEC_CACHE=$work/cache
# CUDA's libraries, where they came as packages: ONNX Runtime looks for them where the system does.
libraries=$("$python" -c 'import glob, sys; print(*(f for p in sys.path for f in glob.glob(p + "/nvidia/*/lib")), sep=":")')
[ -z "$libraries" ] || export LD_LIBRARY_PATH=$libraries${LD_LIBRARY_PATH:+:$LD_LIBRARY_PATH}

# step NAME SECONDS END ARGUMENT..: one process, ended after so many seconds, or END seconds after the beginning of all
step() {
  local name=$1 most=$2 left=$(($3 - SECONDS)) began=$SECONDS status=$UNBEGUN
  shift 3
  [ "$most" -le "$left" ] || most=$left
  if [ "$left" -ge "$LEAST" ]; then
    note "$name: at most $most s"
    mkdir -p "$work/step"
    timeout --kill-after=5 "$most" "$python" -m gpu "$@" --step "$name" --findings "$findings" \
      --work "$work/step" --seconds "$seconds" >&2 &
    child=$!
    wait "$child"
    status=$?
    child=''
    # killed because it did not end when it was asked to; killed before by somebody else is another thing
    if [ "$status" -eq 137 ] && [ $((SECONDS - began)) -ge "$most" ]; then status=124; fi
    rm -rf "$work/step"
  fi
  printf '\n{"step": "%s", "exit": %d, "seconds": %d}\n' "$name" "$status" $((SECONDS - began)) >>"$findings"
  note "$name: exit status $status"
  return "$status"
}

# graphs_of BACKEND: those that it may run; whether this release reads them is for the step to find out
graphs_of() {
  case $1 in
    tensorrt*) echo native primitive ;;
    *) echo "$1" ;;
  esac
}

# seconds_for SHAPE
seconds_for() {
  case $1 in
    32B) echo $((10 * share)) ;;
    7B) echo $((4 * share)) ;;
    *) echo $((2 * share)) ;;
  esac
}

step machine 30 "$limit" machine
opened=()
for backend in "${asked_backends[@]}"; do
  step "opens/$backend" $((3 * share)) "$limit" opens "$backend" && opened+=("$backend")
done
for precision in "${asked_precisions[@]}"; do
  for backend in "${opened[@]}"; do
    for graph in $(graphs_of "$backend"); do
      step "agrees/$backend/$graph/$precision" $((2 * share)) $((limit / 2)) \
        agrees "$backend" "$graph" "$precision"
    done
  done
done
for shape in "${asked_shapes[@]}"; do # the largest comes last
  for precision in "${asked_precisions[@]}"; do
    for backend in "${opened[@]}"; do
      step "times/$backend/$precision/$shape" "$(seconds_for "$shape")" "$limit" \
        times "$backend" "$precision" "$shape"
    done
  done
done

timeout --kill-after=5 20 "$python" -m gpu report --findings "$findings"
status=$?
[ "$status" -le 1 ] || echo '{"error": "there is no report: see what python said above"}'
exit $((status > 0))
