// expect: deleted
// A cache refers to its formats.
#include <quoka/layer/kv_cache.hpp>

#ifdef QUOKA_VALID
const quoka::Format& format();
#else
quoka::Format format();
#endif

quoka::KvCache cache() { return {1, 8, 128, 128, format(), quoka::float_format()}; }
