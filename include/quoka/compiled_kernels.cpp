// The kernels of the compiled library, for the instructions of the flags (kernels/kernels.hpp). A
// part of compiled.cpp; by itself once for each ISA level, where the library has several: there with
// QUOKA_COMPILED_LEVELS, since compiled_levels.cpp chooses between them.
#if !defined(QUOKA_COMPILED)
#error "compile this file, and all that include quoka's headers, with -DQUOKA_COMPILED"
#endif

#define QUOKA_COMPILING_KERNELS
#include <quoka/kernels/arithmetics.hpp>
#include <quoka/kernels/byte_formats.hpp>
#include <quoka/kernels/code_units.hpp>
#include <quoka/kernels/codes.hpp>
#include <quoka/kernels/compact.hpp>
#include <quoka/kernels/format_table.hpp>
#include <quoka/kernels/inverse_norm.hpp>
#include <quoka/kernels/kernels.hpp>
#include <quoka/kernels/key_bits.hpp>
#include <quoka/kernels/list_kernels.hpp>
#include <quoka/kernels/logit_kernels.hpp>
#include <quoka/kernels/panel_arithmetic.hpp>
#include <quoka/kernels/panel_packing.hpp>
#include <quoka/kernels/panel_scores.hpp>
#include <quoka/kernels/row_sums.hpp>
#include <quoka/kernels/token_codes.hpp>
#include <quoka/kernels/token_kernels.hpp>
#include <quoka/runtime/isa.hpp>

#include <Eigen/Core>

namespace quoka {
inline namespace QUOKA_ABI {

template const Format& format_of<float>();
template const Format& format_of<Eigen::half>();
template const Format& format_of<Eigen::bfloat16>();
template const Format& channel_major_format<float>();
template const Format& channel_major_format<Eigen::half>();
template const Format& channel_major_format<Eigen::bfloat16>();

namespace detail {

template const PanelArithmetic* bfloat16_of_here<1>();
template const PanelArithmetic* bfloat16_of_here<2>();
template const PanelArithmetic* bfloat16_of_here<3>();

}  // namespace detail
}  // namespace QUOKA_ABI
}  // namespace quoka
