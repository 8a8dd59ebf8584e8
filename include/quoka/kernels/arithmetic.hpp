// What both products of attention are computed in, by name.
//
// With headers alone an Arithmetic brings its kernels, so that those a program names are compiled and
// no others. With the compiled library it is an id, which the library's instructions give a meaning.
#pragma once

#include <quoka/base/version.hpp>

namespace quoka {
inline namespace QUOKA_ABI {

namespace detail {

class PanelArithmetic;

enum class ArithmeticId { single, fixed16 };

constexpr const char* name_of(ArithmeticId id) {
  switch (id) {
    case ArithmeticId::single:
      return "single";
    case ArithmeticId::fixed16:
      return "fixed16";
  }
  return "";
}

// The kernels that an arithmetic comes to on the ISA that this is compiled for.
template <ArithmeticId id>
const PanelArithmetic& panels_of();

using PanelsOf = const PanelArithmetic& (*)();
#if defined(QUOKA_COMPILED)
template <ArithmeticId>
inline constexpr PanelsOf known_panels = nullptr;
#else
template <ArithmeticId id>
inline constexpr PanelsOf known_panels = panels_of<id>;
#endif

// A template, so that the kernels of an arithmetic that nobody names are not compiled.
template <class Self>
struct Arithmetics {
  // Float.
  static const Self single;
  // 16-bit fixed point with exact 32-bit sums, where the ISA has one instruction for it: 1.55 to
  // 1.76 times as fast. Bits depend on the chunk size. Its error is one of the weights (1/2 of 2^-14
  // of the largest in a block of keys) and of the logits (about 1e-5 |q| |k| scale). On normal and
  // recorded data that is at most 1e-3 of the call's largest output. Where one key with a value near
  // zero outweighs the others, as attention sinks do, it is at most 4e-3 / 2.5e-2 / 0.15 of it with a
  // logit 6 / 8 / 10 above their mean, and may be all of it at 12 (others normal, 80 to 4096 keys);
  // with keys that share an offset of 300 in one channel, at most 8e-3.
  static const Self fixed16;
};

}  // namespace detail

// What Q K^T and P V of a chunk are computed in: Arithmetic::single or Arithmetic::fixed16. Softmax
// is always in single precision, and so is all of one token's attention (token_attention.hpp), which
// is bound by memory.
class Arithmetic : public detail::Arithmetics<Arithmetic> {
 public:
  // The library's own: the named ones above are all there are.
  constexpr Arithmetic(detail::ArithmeticId id, detail::PanelsOf panels)
      : id_(id), panels_(panels) {}

  constexpr const char* name() const { return detail::name_of(id_); }
  constexpr detail::ArithmeticId id() const { return id_; }      // the library's own
  constexpr detail::PanelsOf panels() const { return panels_; }  // null with the compiled library
  friend constexpr bool operator==(const Arithmetic& a, const Arithmetic& b) {
    return a.id_ == b.id_;
  }

 private:
  detail::ArithmeticId id_;
  detail::PanelsOf panels_;
};

namespace detail {

template <class Self>
inline constexpr Self Arithmetics<Self>::single{ArithmeticId::single,
                                                known_panels<ArithmeticId::single>};
template <class Self>
inline constexpr Self Arithmetics<Self>::fixed16{ArithmeticId::fixed16,
                                                 known_panels<ArithmeticId::fixed16>};

}  // namespace detail
}  // namespace QUOKA_ABI
}  // namespace quoka
