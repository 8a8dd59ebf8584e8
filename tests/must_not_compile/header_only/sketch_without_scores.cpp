// A unit that writes a sketch compiles the products of its codes: without their header the linker would miss them.
// expect ALONE: (incomplete type|CodedMass)
// alone
#if defined(ALONE)
#include <quoka/select/key_sketch.hpp>
#else
#include <quoka/select/softmax_scores.hpp>
#endif

void sketch(quoka::KeySketch& of_keys, const quoka::Rows& keys) {
  of_keys.update(keys, 0, keys.len(), quoka::SerialExecutor{});
}
