# Headers compiled without optimisation say so, once in a unit, where the work is done there: CXX with FLAGS and the
# |-separated INCLUDES.
cmake_minimum_required(VERSION 3.21)

include(${CMAKE_CURRENT_LIST_DIR}/compiler_command.cmake)
compiler_command(command -I)  # a system's header says nothing in clang
set(ENV{LC_ALL} C)
set(sentence "quoka is compiled without optimisation")

# expect(COUNT SOURCE FLAG...): SOURCE compiles, and the sentence is said COUNT times.
function(expect count source)
  file(WRITE ${WORK}/unoptimized.cpp "${source}")
  execute_process(COMMAND ${CXX} ${command} -O0 -Werror ${ARGN} -fsyntax-only ${WORK}/unoptimized.cpp
    RESULT_VARIABLE failed ERROR_VARIABLE says)
  if(failed)
    message(FATAL_ERROR "${ARGN}: does not compile:\n${says}")
  endif()
  # A compiler quotes the line besides: the sentence itself stands behind "note: " or "warning: ".
  string(REGEX MATCHALL "(note|warning): [^\n]*${sentence}" found "${says}")
  list(LENGTH found found)
  if(NOT found EQUAL count)
    message(FATAL_ERROR "${ARGN}: said ${found} times, not ${count}:\n${says}")
  endif()
endfunction()

set(two_headers "#include <quoka/base/index.hpp>\n#include <quoka/base/abi.hpp>\n#include <quoka/rows/selection.hpp>\n")
expect(1 "#include <quoka/quoka.hpp>\n")
expect(1 "${two_headers}")
expect(0 "${two_headers}" -O1)
expect(0 "${two_headers}" -O2)
expect(0 "${two_headers}" -DQUOKA_ALLOW_UNOPTIMIZED)
expect(0 "${two_headers}" -DQUOKA_COMPILED)                     # a user of the compiled library
expect(1 "${two_headers}" -DQUOKA_COMPILED -DQUOKA_COMPILING)   # compiled.cpp
