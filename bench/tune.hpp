// quoka_bench --tune: the library's block sizes and distances, tried on this machine.
#pragma once

#include <string>

namespace quoka_bench {

struct TuneFlags {
  std::string name;        // only values whose names contain it
  long long keys = 32768;  // cached keys, at least 64
  double seconds = 60.0;   // of trying, about; building the data comes on top
};

// Prints, for each value of simd/tuning.hpp that can be tried, the default, the candidates and the
// best. Returns what main() returns: 1 if a candidate changed a result, 2 if no value has that name.
int tune(const TuneFlags& flags);

}  // namespace quoka_bench
