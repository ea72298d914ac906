#!/usr/bin/env bash
# Ask SkyPilot and dstack, in environments of their own, where they could run a job with only this machine. Both print a list
# of backends: clouds, Kubernetes, and machines with Docker that are reached by SSH. The list is empty on a plain machine, so
# benchmarks/jobs.py has no figures for them.
set -euo pipefail
cd "$(dirname "$0")/../.."
target=$PWD/benchmarks/peers/.venvs
mkdir -p "$target"

for name in skypilot "dstack[server]"; do
  place=$target/${name%%[*}
  [ -x "$place/bin/pip" ] || python3 -m venv "$place"
  "$place/bin/pip" install --quiet "$name"
done

export HOME=$target/home  # keeps their state out of the user's home
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
