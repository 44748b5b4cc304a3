# Stops the server when its last user has ended, for whatever reason. $1 is the folder of users (one file
# `PID-…` each), $2 how many seconds it may stay empty, $3 the server's data. `rmdir` is the decision: it
# fails if a new user has registered. A process that comes later finds no folder and waits until the server is
# down.
trap '' HUP INT
users=$1 linger=$2 data=$3

stop_server() {
  server=$(head -n 1 "$data/postmaster.pid") || return
  # Another process may have this id by now; a server's working directory is its data folder.
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
  if [ "$empty_for" -ge "$linger" ] && rmdir "$users" 2>/dev/null; then
    stop_server
    exit
  fi
done
