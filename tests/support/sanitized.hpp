// QUOKA_TEST_SANITIZED: a sanitizer has replaced the allocator. Its operator new ends the program
// if memory runs out, instead of throwing std::bad_alloc, and cannot be replaced again.
#pragma once

#if defined(__has_feature)
#if __has_feature(address_sanitizer) || __has_feature(thread_sanitizer) || \
    __has_feature(memory_sanitizer)
#define QUOKA_TEST_SANITIZED
#endif
#endif
#if defined(__SANITIZE_ADDRESS__) || defined(__SANITIZE_THREAD__)
#define QUOKA_TEST_SANITIZED
#endif
