# Targets.  On PGXS: all, install, uninstall, installcheck, clean (PG_CONFIG chooses the server).
# By scripts/, from a bare checkout:
#   check     set up, then every test; ends with "N passed, N failed"
#   check-in-turn  the same, then PostgreSQL 17 or 18 in a Debian of its own; as root
#   demo      a scratch cluster, an endpoint, and events that arrive
#   bench     bench/relay: the relay beside a bare libcurl loop
#   unit      builds and runs the unit tests, no server needed
#   sanitize  the same under ASan and UBSan
#   fuzz      libFuzzer on what takes input from rows and endpoints, FUZZ_SECONDS (60) a target
#   format    clang-format over the tree
#   matrix    the whole check on PostgreSQL 15 to 18, each in a Debian of its own; as root
#
# Options.  FAULT_POINTS=1: with the test-only fault points.  SANITIZE=1: with ASan and UBSan.  ERROR_ON_WARNING=0: warnings do not stop the build.
# Out of tree, so that variants do not clash: make -C build/X -f $PWD/Makefile VPATH=$PWD (what scripts/build does).

root := $(patsubst %/,%,$(dir $(lastword $(MAKEFILE_LIST))))
own_goals := check check-in-turn demo bench unit sanitize fuzz format matrix

ifneq (,$(filter $(own_goals),$(MAKECMDGOALS)))

# These come first and without PGXS: on a bare machine there is no pg_config yet.
ifneq (,$(filter-out $(own_goals),$(MAKECMDGOALS)))
$(error run $(filter $(own_goals),$(MAKECMDGOALS)) and $(filter-out $(own_goals),$(MAKECMDGOALS)) in separate make commands)
endif

.PHONY: $(own_goals)
check check-in-turn demo fuzz format matrix:
	+@$(root)/scripts/$@
bench:
	+@$(root)/bench/relay
unit sanitize:
	+@$(root)/scripts/check-unit $@

else

PG_CONFIG ?= pg_config
PGXS := $(shell $(PG_CONFIG) --pgxs)
ifeq (,$(wildcard $(PGXS)))
$(error no server headers at "$(PG_CONFIG)": install postgresql-server-dev-NN, or set PG_CONFIG, or let "make check" do it)
endif
pg_version := $(shell $(PG_CONFIG) --version)
pg_major := $(firstword $(subst ., ,$(shell echo '$(pg_version)' | sed 's/^[^0-9]*\([0-9]*\).*/\1/')))
ifeq (,$(filter 15 16 17 18,$(pg_major)))
$(error outbox_relay supports PostgreSQL 15 to 18, and $(PG_CONFIG) belongs to $(pg_version))
endif

EXTENSION := outbox_relay
MODULE_big := outbox_relay
version := $(shell sed -n "s/^default_version = '\(.*\)'/\1/p" $(root)/outbox_relay.control)
DATA := $(patsubst $(root)/%,%,$(wildcard $(root)/sql/outbox_relay--*.sql))

sources := $(patsubst $(root)/%,%,$(sort $(wildcard $(root)/src/*.cpp $(root)/src/*/*.cpp)))
ifneq (,$(filter-out 0,$(FAULT_POINTS)))
sources += test/module/guard_functions.cpp
endif
OBJS := $(sources:.cpp=.o)
$(shell mkdir -p $(sort $(dir $(OBJS))))

PG_CPPFLAGS := -I$(root)/src -isystem $(shell $(PG_CONFIG) --includedir-server) \
	-DOUTBOX_RELAY_VERSION='"$(version)"'
ifeq (15,$(pg_major))
# Before 16 PGDLLEXPORT is empty outside Windows, and hidden visibility would hide the entry points too.
PG_CPPFLAGS += -D'PGDLLEXPORT=__attribute__((visibility("default")))'
endif
ifneq (,$(filter-out 0,$(FAULT_POINTS)))
PG_CPPFLAGS += -DOUTBOX_RELAY_FAULT_POINTS
endif

# For a server that runs with the sanitizers' libraries preloaded: scripts/check-sanitized.
ifneq (,$(filter-out 0,$(SANITIZE)))
sanitize_flags := -fsanitize=address,undefined -fno-sanitize-recover=all -fno-omit-frame-pointer
endif

PG_CXXFLAGS := -std=gnu++20 -Wall -Wextra -fvisibility=hidden -fvisibility-inlines-hidden -MMD -MP $(sanitize_flags)
ERROR_ON_WARNING ?= 1
ifneq (0,$(ERROR_ON_WARNING))
PG_CXXFLAGS += -Werror
endif

SHLIB_LINK := -lcurl
ifneq (Darwin,$(shell uname -s))
# Instances of std:: templates have default visibility whatever the flags say; they would merge with another
# extension's, since Postgres loads libraries RTLD_GLOBAL.
SHLIB_LINK += -Wl,--version-script=$(root)/src/exports.map
endif

# C++ links with the C++ compiler: PGXS would take $(CC), and libstdc++ would silently be missing.
override COMPILER = $(CXX) $(CXXFLAGS)
# JIT could inline nothing of this, and clang need not be there.
override with_llvm := no

REGRESS := $(patsubst $(root)/test/sql/%.sql,%,$(sort $(wildcard $(root)/test/sql/*.sql)))
REGRESS_OPTS := --inputdir=$(root)/test
ISOLATION := $(patsubst $(root)/test/specs/%.spec,%,$(sort $(wildcard $(root)/test/specs/*.spec)))
# The outputs lie in expected/ beside those of pg_regress, which is looked for under outputdir first.
ISOLATION_OPTS := --inputdir=$(root)/test --outputdir=.

EXTRA_CLEAN := $(OBJS:.o=.d) .build-flags results regression.diffs regression.out

include $(PGXS)

# Out of tree only sources are looked for in the tree, or objects of an in-tree build would be taken for ours.
srcdir := $(root)
override VPATH :=
vpath %.cpp $(root)
vpath %.control $(root)

# Objects of other flags or another server are no good: this file changes when the flags do.
build_flags := $(pg_version) $(CXX) $(CPPFLAGS) $(CXXFLAGS)
ifneq ($(file <.build-flags),$(build_flags))
$(file >.build-flags,$(build_flags))
endif
$(OBJS): .build-flags
$(shlib): $(root)/src/exports.map

-include $(OBJS:.o=.d)

endif
