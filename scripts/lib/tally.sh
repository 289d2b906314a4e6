# Sourced by the parts of scripts/check. Each part ends with its own line "N passed, N failed", which scripts/check
# adds up.
passed=0
failed=0

# tally PASSED FAILED: adds to the part's counts.
tally() {
    passed=$((passed + $1))
    failed=$((failed + $2))
}

# verdict NAME COMMAND...: one test; its output is shown when it fails.
verdict() {
    local name=$1 output
    shift
    if output=$("$@" 2>&1); then
        echo "ok: $name"
        tally 1 0
    else
        echo "FAILED: $name"
        head -40 <<<"$output"
        tail -n +41 <<<"$output" | tail -40
        tally 0 1
    fi
}

# tally_end: the part's last line; exits 1 when anything failed or nothing was tested.
tally_end() {
    echo "$passed passed, $failed failed"
    [ "$failed" = 0 ] && [ "$passed" -gt 0 ] || exit 1
    exit 0
}
