# Stops the server when its last user has gone, however that user went.
# $1 is the folder of users (a file `PID-…` each), $2 how many seconds it may stay empty, $3 the server's data.
# `rmdir` is the moment of decision: it fails where somebody has come back, and who comes later finds no folder
# and waits for the server to be down.
trap '' HUP INT
users=$1 patience=$2 data=$3

stop_server() {
  server=$(head -n 1 "$data/postmaster.pid") || return
  # The number may be another program's by now; a server works in its data folder.
  if [ -d /proc/self ] && [ "$(readlink "/proc/$server/cwd")" != "$data" ]; then return; fi
  # A fast shutdown: open transactions are rolled back, nothing is lost.
  kill -INT "$server"
}

empty_for=0
while [ -d "$users" ]; do
  sleep 1
  empty_for=$((empty_for + 1))
  for user in "$users"/*; do
    [ -e "$user" ] || continue
    pid=${user##*/}
    if kill -0 "${pid%%-*}" 2>/dev/null; then empty_for=0; else rm -f "$user"; fi
  done
  if [ "$empty_for" -ge "$patience" ] && rmdir "$users" 2>/dev/null; then
    stop_server
    exit
  fi
done
