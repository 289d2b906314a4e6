# Sourced by what needs a server of its own. Everything lies in one temporary folder: a copy of the server's
# programs with the extension installed into it (a prefix), data, sockets, logs. Nothing is installed into the
# system's PostgreSQL, no TCP port of Postgres is opened, and at exit whatever was started is stopped and the
# folder removed. Servers run as an unprivileged user, since Postgres refuses root.
#
# Needs $root (the checkout) and lib/find-postgres.sh.
. "$root/scripts/lib/variants.sh"

# scratch_begin: makes the folder ($scratch) and the traps; inside scripts/check it takes that one's folder.
scratch_begin() {
    scratch_owner=
    initdb_options=()
    find_postgres || { echo "no PostgreSQL 15 to 18 with PGXS: run scripts/install-dependencies" >&2; exit 1; }
    server_user=
    if [ "$(id -u)" = 0 ]; then
        server_user=$(id -un postgres 2>/dev/null || id -un nobody)
    fi
    if [ -n "${OUTBOX_RELAY_SCRATCH:-}" ]; then
        scratch=$OUTBOX_RELAY_SCRATCH
        cd "$scratch"
        return
    fi
    scratch_owner=$BASHPID
    # Short, for the name of a socket has at most 107 bytes.
    scratch=$(mktemp -d /tmp/outbox_relay.XXXXXX)
    trap scratch_end EXIT
    trap 'exit 130' INT
    trap 'exit 143' TERM HUP
    mkdir -p "$scratch/home"
    [ -z "$server_user" ] || chown "$server_user": "$scratch" "$scratch/home"
    export OUTBOX_RELAY_SCRATCH=$scratch
    # The checkout may be closed to the server's user, whose programs want to come back to where they were called.
    cd "$scratch"
}

# scratch_processes: sets $processes to those that run a program out of $scratch or descend from this script.
scratch_processes() {
    local pid candidates
    candidates=$(
        find /proc -maxdepth 2 -path '/proc/[0-9]*/exe' -lname "$scratch/*" 2>/dev/null | cut -d/ -f3
        ps -eo pid=,ppid=,stat= | awk -v top="$scratch_owner" '
            $3 !~ /^Z/ {parent[$1] = $2}
            END {for (pid in parent) for (p = parent[pid]; p in parent; p = parent[p]) if (p == top) {print pid; break}}'
    )
    processes=()
    # What only made the list is gone by now.
    for pid in $(sort -un <<<"$candidates"); do
        ! kill -0 "$pid" 2>/dev/null || processes+=("$pid")
    done
}

# scratch_signal: asks $processes to end. A postmaster by SIGQUIT, for SIGTERM lets it wait for its clients.
scratch_signal() {
    local pid
    for pid in "${processes[@]}"; do
        case $(readlink "/proc/$pid/exe") in
        */postgres) kill -QUIT "$pid" ;;
        # Ends with what it runs, and would otherwise say so.
        */runuser) ;;
        *) kill -TERM "$pid" ;;
        esac 2>/dev/null || true
    done
}

# scratch_end: stops what still runs, removes the folder. Runs at every exit.
scratch_end() {
    local status=$? tries directory
    trap - EXIT
    trap '' INT TERM HUP
    [ "$BASHPID" = "$scratch_owner" ] || exit "$status"
    for directory in "$scratch"/*/data; do
        [ ! -f "$directory/postmaster.pid" ] || cluster_stop "${directory%/data}" immediate || true
    done
    scratch_processes
    scratch_signal
    for ((tries = 0; tries < 100; tries++)); do
        scratch_processes
        [ ${#processes[@]} != 0 ] || break
        [ $tries != 50 ] || kill -KILL "${processes[@]}" 2>/dev/null || true
        sleep 0.1
    done
    cd /
    rm -rf "$scratch"
    exit "$status"
}

# small_disk: sets $small_disk to a folder that is a disk of 8 MB in the namespace that as_server_user's commands run in
# from now on, and that ends with each of them; empty where this user may not mount, not even in a user namespace.
small_disk() {
    local -a unprivileged=()
    small_disk=$scratch/small
    mkdir -p "$small_disk"
    namespace=(unshare -m)
    if [ "$(id -u)" != 0 ]; then
        namespace=(unshare -U -m --map-current-user --keep-caps)
        unprivileged=(setpriv --inh-caps=-all --ambient-caps=-all)
    fi
    namespace+=(sh -c 'mount -t tmpfs -o size=8m,mode=1777 none "$1" && shift && exec "$@"' sh "$small_disk" "${unprivileged[@]}")
    "${namespace[@]}" true 2>/dev/null || { namespace=(); small_disk=; }
}

# as_server_user COMMAND...: runs it unprivileged, with $scratch/home as home and $prefix_bin first in the path.
namespace=()
as_server_user() {
    local -a become=()
    [ -z "$server_user" ] || become=(runuser -u "$server_user" --)
    "${namespace[@]}" "${become[@]}" env -u PGHOST -u PGPORT -u PGUSER -u PGDATABASE -u PGPASSWORD -u PGOPTIONS -u PGSERVICE -u PGDATA \
        HOME="$scratch/home" TMPDIR=/tmp LC_ALL=C.UTF-8 PYTHONDONTWRITEBYTECODE=1 PSQLRC=/dev/null \
        PATH="${prefix_bin:+$prefix_bin:}/usr/local/bin:/usr/bin:/bin:/usr/sbin:/sbin" "$@"
}

# prefix_make VARIANT: builds the variant and installs it into a copy of the server, unless that is there already.
# Sets prefix_bin, prefix_lib. Postgres finds its libraries and files relative to its own programs, so a copy that
# keeps the folders' places to each other takes the copy's.
prefix_make() {
    local variant=$1 prefix=$scratch/prefix-$1 folder options
    variant_options "$variant"
    prefix_bin=$prefix$("$PG_CONFIG" --bindir)
    prefix_lib=$prefix$("$PG_CONFIG" --pkglibdir)
    [ ! -e "$prefix/complete-$pg_major" ] || return 0
    "$root/scripts/build" "$variant"
    for folder in --bindir --pkglibdir --sharedir; do
        folder=$("$PG_CONFIG" "$folder")
        mkdir -p "$prefix$folder"
        cp -RL "$folder/." "$prefix$folder/"
    done
    make -s -C "$root/build/$variant" -f "$root/Makefile" VPATH="$root" PG_CONFIG="$PG_CONFIG" \
        "${options[@]}" install DESTDIR="$prefix" >"$scratch/install.log" 2>&1 ||
        { cat "$scratch/install.log" >&2; echo "installing into the scratch prefix failed" >&2; exit 1; }
    [ -z "$server_user" ] || chown -R "$server_user": "$prefix"
    touch "$prefix/complete-$pg_major"
}

# tree_copy: $scratch/tree with test/, expected/ and sql/, where the server's user may read and write; the
# checkout itself may be closed to it.
tree_copy() {
    [ ! -d "$scratch/tree" ] || return 0
    mkdir "$scratch/tree"
    cp -R "$root/test" "$root/expected" "$root/sql" "$root/README.md" "$root/outbox_relay.control" "$scratch/tree/"
    [ -z "$server_user" ] || chown -R "$server_user": "$scratch/tree"
}

# cluster_start DIRECTORY [LINE...]: cluster_init and cluster_run.
cluster_start() {
    cluster_init "$@"
    cluster_run "$1"
}

# cluster_init DIRECTORY [LINE...]: initialises DIRECTORY/data, with the lines in its configuration and the library
# preloaded. Superuser: postgres. initdb_options: more options of initdb.
cluster_init() {
    local directory=$1
    shift
    as_server_user mkdir -p "$directory"
    as_server_user initdb -D "$directory/data" -U postgres -A trust -E UTF8 --no-locale --no-sync "${initdb_options[@]}" \
        >"$scratch/initdb.log" 2>&1 || { cat "$scratch/initdb.log" >&2; echo "initdb failed" >&2; exit 1; }
    printf '%s\n' "shared_preload_libraries = 'outbox_relay'" "listen_addresses = ''" \
        "unix_socket_directories = '$directory'" "log_line_prefix = '%m [%p] %b '" "timezone = 'UTC'" "$@" |
        as_server_user tee -a "$directory/data/postgresql.conf" >/dev/null
}

# cluster_run DIRECTORY: starts it on a socket in DIRECTORY alone. Its log is DIRECTORY/log.
cluster_run() {
    local directory=$1
    as_server_user pg_ctl -D "$directory/data" -l "$directory/log" -w -t 60 start >/dev/null ||
        { tail -20 "$directory/log" >&2; echo "the scratch cluster did not start: its log's end is above" >&2; exit 1; }
}

# cluster_stop DIRECTORY [MODE]
cluster_stop() {
    as_server_user pg_ctl -D "$1/data" -m "${2:-fast}" -w -t 60 stop >/dev/null
}

# cluster_sql DIRECTORY [psql arguments...]: psql as superuser, unaligned, stops at the first error; SQL by -c or stdin.
cluster_sql() {
    local directory=$1
    shift
    as_server_user psql -X -q -A -t -v ON_ERROR_STOP=1 -h "$directory" -U postgres -d postgres "$@"
}

# endpoint_start DIRECTORY [option...]: starts test/endpoint; sets endpoint_pid, endpoint_http, endpoint_control.
# Its output is DIRECTORY/endpoint.out, its records DIRECTORY/requests.jsonl. It ends with this script at the latest.
endpoint_start() {
    local directory=$1 tries=0
    shift
    tree_copy
    as_server_user mkdir -p "$directory"
    as_server_user python3 "$scratch/tree/test/endpoint/endpoint.py" --port-file "$directory/ports" --log "$directory/requests.jsonl" \
        --parent-pid $$ "$@" >"$directory/endpoint.out" 2>&1 &
    until [ -s "$directory/ports" ]; do
        tries=$((tries + 1))
        [ $tries -lt 200 ] || { cat "$directory/endpoint.out" >&2; echo "the endpoint did not start" >&2; exit 1; }
        sleep 0.05
    done
    endpoint_pid=$(sed -n 's/^pid=//p' "$directory/ports")
    endpoint_http=$(sed -n 's/^http=//p' "$directory/ports")
    endpoint_control=$(sed -n 's/^control=//p' "$directory/ports")
}
