#!/usr/bin/env bash
# SkyPilot and dstack, in environments of their own: where could they run a job with nothing but this machine? Both answer
# with a list of places: clouds, Kubernetes, machines reached by SSH with Docker on them. It is empty here, so
# benchmarks/jobs.py has no figures of them.
set -euo pipefail
cd "$(dirname "$0")/../.."
target=$PWD/benchmarks/peers/.venvs
mkdir -p "$target"

for name in skypilot "dstack[server]"; do
  place=$target/${name%%[*}
  [ -x "$place/bin/pip" ] || python3 -m venv "$place"
  "$place/bin/pip" install --quiet "$name"
done

export HOME=$target/home  # they keep their state there, and not in the user's
mkdir -p "$HOME"

echo "--- SkyPilot"
"$target/skypilot/bin/sky" check 2>&1 | sed -n '/Enabled infra/,$p' || true
"$target/skypilot/bin/sky" api stop

echo "--- dstack"
"$target/dstack/bin/dstack" server --host 127.0.0.1 --port 18300 --token benchmark > "$HOME/dstack.log" 2>&1 &
server=$!
trap 'kill "$server"' EXIT
for _ in $(seq 60); do grep -q "is ready" "$HOME/dstack.log" && break; sleep 1; done
"$target/dstack/bin/dstack" project add --name main --url http://127.0.0.1:18300 --token benchmark --yes
"$target/dstack/bin/dstack" offer --max-offers 3 || true
