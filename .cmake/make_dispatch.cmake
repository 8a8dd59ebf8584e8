# ${FOLDER}/dispatch.cpp: under each kernel's name a jump through a table, and each level's own addresses to put there. All levels must have the same names.
cmake_minimum_required(VERSION 3.21)

set(names "")
set(first "")
set(addresses "")
foreach(level IN LISTS LEVELS)
  string(MAKE_C_IDENTIFIER "${level}" suffix)
  file(STRINGS ${FOLDER}/${suffix}.entries entries)
  if(NOT first)
    set(first ${level})
    set(common ${entries})
  elseif(NOT entries STREQUAL common)
    message(FATAL_ERROR "${level} and ${first} do not define the same functions")
  endif()
  string(APPEND names "    \"${level}\",\n")
  foreach(entry IN LISTS entries)
    string(APPEND addresses "  .hidden ${entry}__${suffix}\n  .quad ${entry}__${suffix}\n")
  endforeach()
  if(level STREQUAL first)
    set(addresses_of_first "${addresses}")
  endif()
endforeach()
list(LENGTH LEVELS levels)
list(LENGTH common count)

set(jumps "")
set(offset 0)
foreach(entry IN LISTS common)
  if(PROCESSOR MATCHES "x86_64|AMD64")
    set(jump "  endbr64\n  jmp *quoka_entries+${offset}(%rip)")
  else()
    set(entry_at "quoka_entries+${offset}")
    set(jump "  hint #34\n  adrp x16, ${entry_at}\n  ldr x16, [x16, #:lo12:${entry_at}]\n  br x16")
  endif()
  string(APPEND jumps "  .balign 16\n  .globl ${entry}\n  .type ${entry}, %function\n"
    "${entry}:\n${jump}\n  .size ${entry}, .-${entry}\n")
  math(EXPR offset "${offset} + 8")
endforeach()

file(WRITE ${FOLDER}/dispatch.cpp "// Made by .cmake/make_dispatch.cmake.
#include <cstddef>

asm(R\"(
  .data
  .balign 8
  .globl quoka_entries
  .hidden quoka_entries
quoka_entries:
${addresses_of_first}
  .section .data.rel.ro, \"aw\", %progbits
  .balign 8
  .globl quoka_level_entries
  .hidden quoka_level_entries
quoka_level_entries:
${addresses}
  .text
${jumps})\");

extern \"C\" {
extern const char* const quoka_level_names[];
extern const std::size_t quoka_level_count, quoka_entry_count;
const char* const quoka_level_names[] = {
${names}};
const std::size_t quoka_level_count = ${levels}, quoka_entry_count = ${count};
void quoka_choose_level();
}

__attribute__((constructor(101))) static void choose_level() { quoka_choose_level(); }
")
