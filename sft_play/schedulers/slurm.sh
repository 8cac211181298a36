# A login shell has `module`. Slurm does not make one by itself (`--export=NIL`), and may set no HOME, which login scripts need.
shopt -q login_shell || HOME=~ USER=${USER:-$(id -un)} exec /bin/bash -l "$0"

# A signal that asks for a stop may come at any time from here on.
stopped=
trap 'stopped=1' USR1 TERM
# The configuration is frozen in the file below: variables of the shell that submitted this no longer count.
for name in "${!SFT_@}"; do unset "$name"; done
# What srun takes for options: of the job or the profile in which 'sbatch' was typed. Those of this job's own options stay.
for name in "${!SRUN_@}" "${!SLURM_@}"; do
  case $name in
    @DESCRIBING@) ;;
    *) unset "$name" ;;
  esac
done
@ENVIRONMENT@

# shellcheck disable=SC2317,SC2329 # called by the trap below
setup_failed() {
  local text
  if ((${#BASH_SOURCE[@]} > 2)); then return; fi # of a sourced file only its end counts
  text=$(sed -n "$2p" "$0" 2>/dev/null)
  printf '[%s] slurm job %s: slurm.setup failed with code %s in line %s of this script: %s\n' \
    "$(date '+%F %T')" "$SLURM_JOB_ID" "$1" "$2" "${text:-$3}"
  echo "nothing was started; '|| true' after a command lets it fail"
  exit 3
}
trap 'setup_failed "$?" "$LINENO" "$BASH_COMMAND"' ERR # as under 'set -e'
# slurm.setup
@SETUP@
trap - ERR
set +e -u

@JOB@
# SLURM_RESTART_COUNT may be that of the job in which 'sbatch' was typed.
turn=${SLURM_RESTART_COUNT:-0}
if [[ $(scontrol show job "$job_id" --oneliner) =~ Restarts=([0-9]+) ]]; then turn=${BASH_REMATCH[1]}; fi

say() { printf '[%s] slurm job %s: %s\n' "$(date '+%F %T')" "$job_id" "$1"; }

# Runs a command and returns its exit code; a signal that asks for a stop is passed on to it as $1.
passing_on() {
  local as=$1 code heard
  shift
  child=
  trap 'heard=1; stopped=1; [[ -n $child ]] && kill -s "$as" "$child" 2>/dev/null' USR1 TERM
  if [[ -n ${stopped:-} ]]; then return 143; fi
  "$@" &
  child=$!
  if [[ -n ${stopped:-} ]]; then kill -s "$as" "$child" 2>/dev/null; fi # it came before there was a child
  while :; do
    heard=
    wait "$child"
    code=$?
    if [[ -z $heard ]]; then break; fi # otherwise the signal ended the waiting
  done
  child=
  return "$code"
}

# What one node does: the command that a person would type there. Node 0 prints to the job's output, others to a file next to it.
# shellcheck disable=SC2317,SC2329 # called on the nodes, by its text
on_node() {
  local log=$1 codes=$2 code
  shift 2
  if [[ $SLURM_NODEID != 0 ]]; then exec >>"$log.node$SLURM_NODEID.out" 2>&1; fi
  if [[ $SLURM_NNODES != 1 ]]; then set -- "$@" NODE_RANK="$SLURM_NODEID"; fi
  export SFT_PLAY_CAUSE_FILE="$codes/$SLURM_NODEID.cause"
  passing_on TERM "$@"
  code=$?
  printf '%s\n' "$code" >"$codes/$SLURM_NODEID"
  return "$code"
}

# The job's exit code from those of the nodes: a permanent error before a lost peer, that before a stop on request.
verdict() {
  local srun_code=$1 node code found=
  for ((node = 0; node < SLURM_NNODES; node++)); do
    code=
    [[ -s $codes/$node ]] && read -r code <"$codes/$node"
    case $code in
      [1-5]) printf '%s' "$code"; return ;;
      75) found=75 ;;
      143) found=${found:-143} ;;
    esac
  done
  if [[ -z $found && $srun_code == 138 ]]; then found=143; fi # srun itself took the warning (128 + SIGUSR1), before it had tasks
  printf '%s' "${found:-$srun_code}"
}

# Whether a program has the port on this node, which is node 0: in any state but TIME_WAIT (06).
port_is_taken() {
  local hex
  printf -v hex "%04X" "$1"
  grep -Eqs "^ *[0-9]+: [0-9A-F]+:$hex [0-9A-F]+:[0-9A-F]+ 0[^6]" /proc/net/tcp /proc/net/tcp6
}

if [[ $SLURM_NNODES != 1 ]]; then
  read -r first < <(scontrol show hostnames "$SLURM_JOB_NODELIST")
  # Its address as Slurm knows it: names of nodes do not resolve everywhere.
  if [[ $(scontrol show node "$first" --oneliner) =~ NodeAddr=([^[:space:]]+) ]]; then first=${BASH_REMATCH[1]}; fi
  # Ten ports for each job, since every attempt takes the next one; no two tasks of an array begin with the same.
  for ((tried = 0; tried < 1000; tried++)); do
    port=$((20000 + (SLURM_JOB_ID + tried) % 1000 * 10))
    if ! port_is_taken "$port"; then break; fi
  done
  command+=(NUM_NODES="$SLURM_NNODES" MASTER_ADDR="$first" MASTER_PORT="$port")
  # Who does not know it does not join. srun passes it on in the environment: it is in no file and on no command line.
  export MASTER_KEY=${MASTER_KEY:-$(od -An -N32 -tx1 /dev/urandom | tr -d ' \n')}
fi

say "turn $turn on $SLURM_JOB_NODELIST, run $run_name"
rm -rf -- "$log".??????/ # of a turn of this job that was killed
codes=$(mktemp -d "$log.XXXXXX") || exit 3
# `--wait=0`: no node's end ends another that still saves; `--kill-on-bad-exit=0` likewise. The launchers themselves stop when a peer is lost.
passing_on USR1 srun --nodes="$SLURM_NNODES" --ntasks="$SLURM_NNODES" --ntasks-per-node=1 --cpus-per-task="$cpus" --export=ALL \
  --kill-on-bad-exit=0 --wait=0 --mpi=none --unbuffered \
  bash -c "$(declare -f passing_on on_node); on_node \"\$@\"" node "$log" "$codes" "${command[@]}"
code=$(verdict $?)
cause=
grep -qsx out_of_memory "$codes"/*.cause && cause=memory
rm -rf -- "$codes"

if [[ $code != 75 && $code != 143 ]]; then
  say "ended with code $code"
  exit "$code"
fi
state=
[[ $(scontrol show job "$job_id" --oneliner) =~ JobState=([A-Z_]+) ]] && state=${BASH_REMATCH[1]}
if [[ $state != RUNNING ]]; then
  say "ended with code $code; the job is ${state:-unknown} already, so it is left as it is" # cancelled, or requeued by Slurm itself
elif [[ $code == 75 && $cause == memory ]]; then
  say "ended with code 75 because memory ran out, and would run out again; that node's output says what to change"
elif ((turn >= most_requeues)); then
  say "ended with code $code after $turn requeues, the most that slurm.max_requeues allows; 'sbatch' of this script continues the run"
elif scontrol requeue "$job_id"; then
  say "ended with code $code; requeued, to continue from the last checkpoint"
else
  say "ended with code $code, and the job could not be requeued; 'sbatch' of this script continues the run"
fi
exit "$code"
