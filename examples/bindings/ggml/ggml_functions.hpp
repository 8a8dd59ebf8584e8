// Where the ggml of this process is.
#pragma once

namespace quoka_ggml {

// Finds the functions of ggml that the backend calls, in the library that holds the address
// `caller` and in what it links, or else in the program. To be called before all others. Returns
// the name of one that is not there, or null.
const char* find_ggml_functions(const void* caller);

}  // namespace quoka_ggml
