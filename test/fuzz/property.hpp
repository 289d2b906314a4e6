#pragma once

#include <cstdio>
#include <cstdlib>

/// Ends a fuzz target when a property does not hold; libFuzzer keeps the input.
#define EXPECT_PROPERTY(condition)                                                                           \
    do {                                                                                                     \
        if (!(condition)) {                                                                                  \
            std::fprintf(stderr, "%s:%d: %s does not hold\n", __FILE__, __LINE__, #condition);               \
            std::abort();                                                                                    \
        }                                                                                                    \
    } while (false)
