# Sourced by what builds and installs. The variants of the extension and the options that make them:
#   release    what users get
#   fault      with fault points, for the process tests
#   sanitized  the same under ASan and UBSan, for a server that has their libraries preloaded
# variant_options VARIANT: sets options; fails for an unknown one.
variant_options() {
    case $1 in
    release) options=() ;;
    fault) options=(FAULT_POINTS=1) ;;
    sanitized) options=(FAULT_POINTS=1 SANITIZE=1) ;;
    *) echo "no variant \"$1\": release, fault or sanitized" >&2; return 2 ;;
    esac
}
