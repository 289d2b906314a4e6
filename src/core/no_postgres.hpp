/// Included last by every .cpp of core/ and http/: these layers never see a Postgres header, so no
/// longjmp can cross them. Not a header of declarations, hence no include guard.
#ifdef POSTGRES_H
#error "core/ and http/ must not include Postgres headers"
#endif
#ifdef C_H
#error "core/ and http/ must not include Postgres headers"
#endif
