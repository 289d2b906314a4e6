# Sourced. find_postgres sets PG_CONFIG and pg_major to a server that the extension can be built and tested against.

# True when $1 is a pg_config of PostgreSQL 15 to 18 with the server, its headers and its test drivers.
postgres_is_usable() {
    local config=$1 lib
    "$config" --version 2>/dev/null | grep -qE '^PostgreSQL (15|16|17|18)([^0-9]|$)' || return 1
    lib=$("$config" --pkglibdir)
    [ -f "$("$config" --pgxs)" ] && [ -f "$("$config" --includedir-server)/postgres.h" ] &&
        [ -x "$("$config" --bindir)/postgres" ] && [ -x "$("$config" --bindir)/initdb" ] &&
        [ -x "$lib/pgxs/src/test/regress/pg_regress" ] && [ -f "$lib/pgxs/src/test/perl/PostgreSQL/Test/Cluster.pm" ]
}

# PG_CONFIG of the environment if it is set, else Debian's newest version, else what the PATH has.
# Returns 1, without a word, when none is usable.
find_postgres() {
    local config
    if [ -n "${PG_CONFIG:-}" ]; then
        postgres_is_usable "$PG_CONFIG" || return 1
        PG_CONFIG=$(command -v "$PG_CONFIG")
    else
        for config in $(ls -d /usr/lib/postgresql/*/bin/pg_config 2>/dev/null | sort -rV) "$(command -v pg_config)"; do
            if [ -n "$config" ] && postgres_is_usable "$config"; then
                PG_CONFIG=$config
                break
            fi
        done
        [ -n "${PG_CONFIG:-}" ] || return 1
    fi
    pg_major=$("$PG_CONFIG" --version | sed 's/^[^0-9]*\([0-9]*\).*/\1/')
    export PG_CONFIG
}
