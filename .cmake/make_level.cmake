# OBJECT, compiled_kernels.cpp for one level, as ${OUT}.o: its kernels with __${SUFFIX} behind their names, everything
# else local. ${OUT}.entries lists those names.
cmake_minimum_required(VERSION 3.21)

function(run)
  execute_process(COMMAND ${ARGN} COMMAND_ERROR_IS_FATAL ANY)
endfunction()

cmake_path(GET OUT PARENT_PATH folder)
file(MAKE_DIRECTORY ${folder})
# Sections that the linker would merge with another unit's of the same name become plain ones.
run(${LD} -r --force-group-allocation -o ${OUT}.whole.o ${OBJECT})

execute_process(COMMAND ${NM} --defined-only --format=posix ${OUT}.whole.o
  OUTPUT_VARIABLE symbols COMMAND_ERROR_IS_FATAL ANY)
string(REPLACE "\n" ";" symbols "${symbols}")
set(entries "")
foreach(symbol IN LISTS symbols)
  # Functions that are not inline, and the explicit instantiations.
  if(symbol MATCHES "^([^ ]+) T |^(_ZN5quoka[0-9]+v[0-9_a-z]*(9format_of|20channel_major_format|6detail16bfloat16_of_here)I[^ ]+) W ")
    list(APPEND entries ${CMAKE_MATCH_1}${CMAKE_MATCH_2})
  endif()
endforeach()
if(NOT entries)
  message(FATAL_ERROR "${OBJECT} defines no function")
endif()
list(SORT entries)

list(TRANSFORM entries REPLACE "(.+)" "\\1 \\1__${SUFFIX}\n" OUTPUT_VARIABLE renamed)
list(TRANSFORM entries APPEND "__${SUFFIX}\n" OUTPUT_VARIABLE kept)
string(CONCAT renamed ${renamed})
string(CONCAT kept ${kept})
file(WRITE ${OUT}.renamed "${renamed}")
file(WRITE ${OUT}.kept "${kept}")
run(${OBJCOPY} --redefine-syms=${OUT}.renamed ${OUT}.whole.o ${OUT}.renamed.o)
run(${OBJCOPY} --keep-global-symbols=${OUT}.kept ${OUT}.renamed.o ${OUT}.o)
file(REMOVE ${OUT}.whole.o ${OUT}.renamed.o ${OUT}.renamed ${OUT}.kept)
list(JOIN entries "\n" entries)
file(WRITE ${OUT}.entries "${entries}\n")
