// expect: (incomplete type|CodedMass)
// alone
// A unit that writes a sketch compiles the products of its codes: without their header the linker would miss them.
#ifdef QUOKA_VALID
#include <quoka/select/softmax_scores.hpp>
#else
#include <quoka/select/key_sketch.hpp>
#endif

void sketch(quoka::KeySketch& of_keys, const quoka::Rows& keys) {
  of_keys.update(keys, 0, keys.len(), quoka::SerialExecutor{});
}
