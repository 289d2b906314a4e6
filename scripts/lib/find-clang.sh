# Sourced by what fuzzes. find_clang sets clang to a clang++ that has libFuzzer; fails when there is none.
find_clang() {
    local program='extern "C" int LLVMFuzzerTestOneInput(const unsigned char *, unsigned long) { return 0; }'
    for clang in clang++ $(compgen -c clang++- | grep -xE 'clang\+\+-[0-9]+' | sort -ru); do
        if command -v "$clang" >/dev/null && echo "$program" | "$clang" -fsanitize=fuzzer,address -x c++ - -o /dev/null 2>/dev/null; then
            return 0
        fi
    done
    clang=
    return 1
}
