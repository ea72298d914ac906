#!/usr/bin/env bash
# The programs that tests start and pip doesn't install: Java, PostgreSQL, Chromium, Slurm, iproute2, and Azurite from npm.
# Azurite goes into the environment VENV.
#
# Installs what is missing if this is root on a machine with apt-get. Otherwise prints one line for each missing program,
# with the tests that need it and the package to install, and fails.
set -euo pipefail

packages=()
lines=()

# need PACKAGE TESTS: note that a package is missing, and which tests start its program.
need() {
  packages+=("$1")
  lines+=("missing: $1, which $2 need. Install it with: apt-get install $1")
}

command -v java >/dev/null ||
  need openjdk-17-jre-headless "the tests of Spark (tests/launch/test_spark.py, tests/launch/test_conformance.py, tests/compat/test_petastorm.py, tests/lab/test_engines.py, tests/test_examples.py, tests/test_benchmarks.py)"
compgen -G "/usr/lib/postgresql/*/bin/initdb" >/dev/null ||
  need postgresql "the tests of jobs on PostgreSQL (tests/jobs/test_store.py, tests/jobs/test_team.py)"
command -v chromium chromium-browser google-chrome >/dev/null ||
  need chromium "the tests of the page of jobs and of reports (tests/server/test_page.py, tests/reporting/test_page.py)"
{ command -v slurmctld && command -v slurmd && command -v munged; } >/dev/null ||
  need "slurm-wlm munge" "the tests of Slurm (tests/jobs/backends/test_slurm_jobs.py, tests/jobs/backends/test_conformance.py, tests/launch/test_slurm_allocation.py, tests/test_benchmarks.py)"
command -v ip >/dev/null ||
  need iproute2 "the tests of the lab (tests/lab)"

command -v npm >/dev/null ||
  need npm "the tests of Azure Blob Storage (tests/data/test_object_storage.py, tests/checkpoint/storage/test_objects.py)"

# Azurite, Microsoft's emulator of Azure Blob Storage.
install_azurite() {
  local folder=${VENV:-.venv}/azurite
  [[ -x $folder/node_modules/.bin/azurite-blob ]] ||
    npm install --prefix "$folder" --no-audit --no-fund --silent azurite@3.35.0
}

if ! ((${#packages[@]})); then
  install_azurite
  exit
fi

if [[ $(id -u) == 0 ]] && command -v apt-get >/dev/null; then
  echo "installing ${packages[*]}"
  if apt-get update -qq && DEBIAN_FRONTEND=noninteractive apt-get install -y -qq --no-install-recommends ${packages[*]} >/dev/null; then
    install_azurite
    exit
  fi
fi

printf '%s\n' "${lines[@]}" >&2
exit 1
