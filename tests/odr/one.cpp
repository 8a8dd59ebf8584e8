// Linked with two.cpp, which is compiled with other instructions, and first: two users of the library
// in one program. Each must get functions of its own: main, which calls two.cpp's alone when it has an
// argument, then runs where one.cpp's instructions are absent.
#include <quoka/quoka.hpp>

#include <cmath>
#include <vector>

float use_in_one(float* x);
float use_in_one(float* x) {
#include "odr/use.inc"
}
