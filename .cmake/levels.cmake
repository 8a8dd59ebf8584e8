# One binary, many machines: quoka::compiled for several ISA levels, one of which is chosen when the program starts.
#
#   compiled.cpp, once per level  ->  ld -r, objcopy: its public functions get the level's suffix, all others become
#   local  ->  dispatch.cpp: under each public name one jump through a table  ->  compiled_levels.cpp fills the table
#
# Types are the same for all levels, and so are the names that users link. What a level's object instantiates of std and
# Eigen is its own: no other part of the program can come to call it. Needs GNU binutils, and GCC or Clang on ELF.

set(quoka_levels_dir ${CMAKE_CURRENT_LIST_DIR})

# From the most common to the best. compiled_levels.cpp knows by these names what a level needs.
set(quoka_flags_of_x86-64-v2 -march=x86-64-v2)
set(quoka_flags_of_x86-64-v3 -march=x86-64-v3)
set(quoka_flags_of_x86-64-v3-vnni -march=x86-64-v3 -mavxvnni)
set(quoka_flags_of_x86-64-v4 -march=x86-64-v4)
set(quoka_flags_of_x86-64-v4-vnni -march=x86-64-v4 -mavx512vnni)
set(quoka_flags_of_x86-64-v4-bf16 -march=x86-64-v4 -mavx512vnni -mavx512bf16)
set(quoka_flags_of_x86-64-v4-amx
  -march=x86-64-v4 -mavx512vnni -mavx512bf16 -mamx-tile -mamx-bf16 -mamx-int8)
set(quoka_flags_of_armv8-a -march=armv8-a)
set(quoka_flags_of_armv8.2-a-dotprod -march=armv8.2-a+dotprod)
set(quoka_flags_of_armv8.6-a -march=armv8.6-a)

# GNU's linker: lld cannot join objects so that groups are resolved.
find_program(quoka_level_linker NAMES ${CMAKE_SYSTEM_PROCESSOR}-linux-gnu-ld ld.bfd ld)
mark_as_advanced(quoka_level_linker)

# Can they be built here, and which are usual?
set(quoka_usual_levels "")
if(CMAKE_OBJCOPY AND CMAKE_NM AND quoka_level_linker AND CMAKE_EXECUTABLE_FORMAT STREQUAL "ELF"
    AND CMAKE_CXX_COMPILER_ID MATCHES "^(GNU|Clang)$")
  if(CMAKE_SYSTEM_PROCESSOR MATCHES "x86_64|AMD64")
    set(quoka_usual_levels x86-64-v2 x86-64-v3 x86-64-v4 x86-64-v4-vnni x86-64-v4-bf16 x86-64-v4-amx)
  elseif(CMAKE_SYSTEM_PROCESSOR MATCHES "aarch64")
    set(quoka_usual_levels armv8-a armv8.2-a-dotprod armv8.6-a)
  endif()
endif()

# The sources of the static library `target`, for levels from the most common to the best.
function(quoka_add_levels target)
  if(NOT quoka_usual_levels)
    message(FATAL_ERROR "QUOKA_ISA_LEVELS: needs GCC or Clang, GNU binutils and ELF, on x86-64 or aarch64")
  endif()
  set(folder ${CMAKE_CURRENT_BINARY_DIR}/${target})
  set(objects "")
  set(entries "")
  foreach(level IN LISTS ARGN)
    if(NOT DEFINED quoka_flags_of_${level})
      message(FATAL_ERROR "QUOKA_ISA_LEVELS: no ${level}; the usual ones here: ${quoka_usual_levels}")
    endif()
    string(MAKE_C_IDENTIFIER "${level}" suffix)
    set(part ${target}_${suffix})
    add_library(${part} OBJECT EXCLUDE_FROM_ALL ${PROJECT_SOURCE_DIR}/include/quoka/compiled.cpp)
    target_link_libraries(${part} PRIVATE quoka)
    target_compile_definitions(${part} PRIVATE QUOKA_COMPILED QUOKA_COMPILED_LEVEL)
    target_compile_options(${part} PRIVATE ${quoka_flags_of_${level}} -fno-fast-math -fno-lto
      $<$<CXX_COMPILER_ID:GNU>:-fno-gnu-unique>)
    set_target_properties(${part} PROPERTIES POSITION_INDEPENDENT_CODE ON)
    add_custom_command(OUTPUT ${folder}/${suffix}.o ${folder}/${suffix}.entries
      COMMAND ${CMAKE_COMMAND} -D LD=${quoka_level_linker} -D NM=${CMAKE_NM} -D OBJCOPY=${CMAKE_OBJCOPY}
        -D OBJECT=$<TARGET_OBJECTS:${part}> -D SUFFIX=${suffix} -D OUT=${folder}/${suffix}
        -P ${quoka_levels_dir}/make_level.cmake
      DEPENDS ${part} $<TARGET_OBJECTS:${part}> ${quoka_levels_dir}/make_level.cmake
      COMMENT "Taking ${level} apart" VERBATIM)
    list(APPEND objects ${folder}/${suffix}.o)
    list(APPEND entries ${folder}/${suffix}.entries)
  endforeach()
  add_custom_command(OUTPUT ${folder}/dispatch.cpp
    COMMAND ${CMAKE_COMMAND} -D "LEVELS=${ARGN}" -D FOLDER=${folder} -D PROCESSOR=${CMAKE_SYSTEM_PROCESSOR}
      -P ${quoka_levels_dir}/make_dispatch.cmake
    DEPENDS ${entries} ${quoka_levels_dir}/make_dispatch.cmake VERBATIM)
  set_source_files_properties(${objects} PROPERTIES EXTERNAL_OBJECT TRUE GENERATED TRUE)
  target_sources(${target} PRIVATE
    ${folder}/dispatch.cpp ${PROJECT_SOURCE_DIR}/include/quoka/compiled_levels.cpp ${objects})
endfunction()
