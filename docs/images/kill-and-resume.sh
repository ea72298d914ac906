#!/usr/bin/env bash
# The session in kill-and-resume.svg. To record it again, from the root of the repository:
#
#   pip install termtosvg
#   termtosvg docs/images/kill-and-resume.svg -c docs/images/kill-and-resume.sh -g 100x28 -D 4000 -M 1500 -t window_frame
set -u
program=$PWD/examples/images.py
cd "$(mktemp -d)" || exit
cp "$program" .
export OMP_NUM_THREADS=1

prompt() {
    printf '\e[1;32m$\e[0m '
    sleep 1
    for ((i = 0; i < ${#1}; i++)); do
        printf '%s' "${1:i:1}"
        sleep 0.04
    done
    echo
}

# kill -9, from another terminal, in the second epoch
(
    until compgen -G "runs/images/checkpoints/*step=250.ckpt/meta.json" > /dev/null; do sleep 0.02; done
    pkill -9 -f "^python images.py"
) &

prompt "python images.py"
# The shell's own message names a line of this script.
{ python images.py 2>&3; } 3>&2 2>/dev/null
printf '\nKilled\n'
prompt "python images.py    # again"
python images.py
prompt "rm -r runs && python images.py    # never killed"
rm -r runs && python images.py
sleep 2
