// Rounding modes other than to nearest, and denormals taken for zeros, as a program may have set them for its threads
// (std::fesetround, FTZ, DAZ).
//
//   const RoundingMode mode = random.one_of(rounding_modes);
//   const Selection keep = in(mode, [&] { return top_k(scores, 7); });
#pragma once

#include <cfenv>

#if defined(__SSE2__)
#include <xmmintrin.h>
#endif

namespace quoka_test {

struct RoundingMode {
  const char* name;
  int rounding;
  bool no_denormals;
};
inline constexpr RoundingMode rounding_modes[] = {
    {"to nearest", FE_TONEAREST, false},
    {"upward", FE_UPWARD, false},
    {"downward", FE_DOWNWARD, false},
    {"toward zero", FE_TOWARDZERO, false},
#if defined(__SSE2__)
    {"to nearest, denormals are zeros", FE_TONEAREST, true},
    {"downward, denormals are zeros", FE_DOWNWARD, true},
#endif
};

// f() in a mode of this thread; the mode is left before its result is looked at.
template <class F>
auto in(const RoundingMode& mode, F&& f) {
  struct Before {
    std::fenv_t modes;
    Before() { std::fegetenv(&modes); }
    Before(const Before&) = delete;
    ~Before() { std::fesetenv(&modes); }
  };
  const Before before;
  std::fesetround(mode.rounding);
#if defined(__SSE2__)
  if (mode.no_denormals) _mm_setcsr(_mm_getcsr() | 0x8040u);
#endif
  return f();
}

}  // namespace quoka_test
