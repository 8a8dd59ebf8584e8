# One binary, many machines: quoka::compiled for several ISA levels, one of which is chosen when the program starts.
#
#   compiled.cpp  ->  the drivers, once, with the instructions of the project's flags
#   compiled_kernels.cpp, once per level  ->  ld -r, objcopy: its kernels get the level's suffix, all others become
#   local  ->  dispatch.cpp: under each kernel's name one jump through a table  ->  compiled_levels.cpp fills the table
#
# Types are the same for all levels, and so are the names of kernels. A level's object has its own instantiations
# of std: no other part of the program can call them. Needs GNU binutils, and GCC or Clang on ELF.

set(quoka_levels_dir ${CMAKE_CURRENT_LIST_DIR})
# Known in the folder of whoever builds quoka, too (quoka_finish_levels).
set(quoka_compiled_cpp ${PROJECT_SOURCE_DIR}/include/quoka/compiled.cpp CACHE INTERNAL "")
set(quoka_kernels_cpp ${PROJECT_SOURCE_DIR}/include/quoka/compiled_kernels.cpp CACHE INTERNAL "")
set(quoka_names_a_processor "(^|[ ;:,>\"])-m(arch=|cpu=|avx|fma|f16c|sse[3-9]|bmi|amx)" CACHE INTERNAL "")

# From the most common to the best. compiled_levels.cpp finds a level's needs by these names.
set(quoka_flags_of_plain -DEIGEN_DONT_VECTORIZE)  # for tests
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

# GNU's tools, whatever the compiler brings: lld cannot join objects so that groups are resolved.
find_program(quoka_level_linker NAMES ${CMAKE_SYSTEM_PROCESSOR}-linux-gnu-ld ld.bfd ld)
find_program(quoka_level_objcopy NAMES ${CMAKE_SYSTEM_PROCESSOR}-linux-gnu-objcopy objcopy)
find_program(quoka_level_nm NAMES ${CMAKE_SYSTEM_PROCESSOR}-linux-gnu-nm nm)
mark_as_advanced(quoka_level_linker quoka_level_objcopy quoka_level_nm)

# Can they be built here, and which are usual?
set(quoka_usual_levels "")
if(quoka_level_linker AND quoka_level_objcopy AND quoka_level_nm AND CMAKE_EXECUTABLE_FORMAT STREQUAL "ELF"
    AND CMAKE_CXX_COMPILER_ID MATCHES "^(GNU|Clang)$")
  if(CMAKE_SYSTEM_PROCESSOR MATCHES "x86_64|AMD64")
    set(quoka_usual_levels x86-64-v2 x86-64-v3 x86-64-v4 x86-64-v4-vnni x86-64-v4-bf16 x86-64-v4-amx)
  elseif(CMAKE_SYSTEM_PROCESSOR MATCHES "aarch64")
    set(quoka_usual_levels armv8-a armv8.2-a-dotprod armv8.6-a)
  endif()
endif()

# Sets `result` to the reason why those who have not asked for levels do not get them, or to nothing. A user's build must
# not fail for the sake of speed: this looks closer than the above.
function(quoka_no_levels result)
  set(flags "${CMAKE_CXX_FLAGS} ${quoka_processor}")
  string(TOUPPER "${CMAKE_BUILD_TYPE}" config)
  string(APPEND flags " ${CMAKE_CXX_FLAGS_${config}}")
  set(reason "")
  if(flags MATCHES "${quoka_names_a_processor}")
    set(reason "the flags name a processor")
  elseif(quoka_own_programs)
    set(reason "our own programs take that of the flags")
  elseif(flags MATCHES "-fsanitize|-fprofile|--coverage|EIGEN_DONT_VECTORIZE|QUOKA_EMULATED_TILES")
    set(reason "the flags watch the code, or choose its form")
  elseif(CMAKE_CONFIGURATION_TYPES)
    set(reason "several configurations would share the levels' files")
  elseif(NOT quoka_usual_levels)
    set(reason "they need GCC or Clang, GNU binutils and ELF, on x86-64 or aarch64")
  else()
    foreach(tool IN ITEMS ${quoka_level_linker} ${quoka_level_objcopy} ${quoka_level_nm})
      execute_process(COMMAND ${tool} --version OUTPUT_VARIABLE says ERROR_QUIET)
      if(NOT says MATCHES "^GNU ")  # LLVM's have the same names, and not all that is asked of them
        set(reason "${tool} is not one of GNU binutils")
      endif()
    endforeach()
    list(GET quoka_usual_levels -1 best)
    include(CheckCXXCompilerFlag)
    list(JOIN quoka_flags_of_${best} " " best)
    check_cxx_compiler_flag("${best}" QUOKA_COMPILER_KNOWS_THE_LEVELS)
    if(NOT reason AND NOT QUOKA_COMPILER_KNOWS_THE_LEVELS)
      set(reason "the compiler does not know ${best}")
    endif()
  endif()
  set(${result} "${reason}" PARENT_SCOPE)
endfunction()

# The sources of `target`: the usual levels, or one, that of its flags (quoka_no_levels). Those who name a processor may do
# so by target_compile_options(quoka_compiled ...), after add_subdirectory(): so it is read when the whole project has
# been configured.
function(quoka_choose_levels target)
  quoka_no_levels(reason)
  if(reason)
    quoka_one_level(${target})
    if(NOT reason MATCHES "^(our own programs|the flags) ")
      message(STATUS "quoka::compiled, if it is linked, has one ISA level, that of its flags: ${reason}")
    endif()
    return()
  endif()
  quoka_level_sources(${target} sources ${quoka_usual_levels})
  set_property(GLOBAL PROPERTY quoka_compiled_sources ${sources})
  cmake_language(DEFER DIRECTORY ${CMAKE_SOURCE_DIR} CALL quoka_finish_levels)
endfunction()
function(quoka_finish_levels)
  get_target_property(options quoka_compiled COMPILE_OPTIONS)
  if(options MATCHES "${quoka_names_a_processor}")
    quoka_one_level(quoka_compiled)
  else()
    get_property(sources GLOBAL PROPERTY quoka_compiled_sources)
    quoka_use_levels(quoka_compiled ${sources})
  endif()
endfunction()

function(quoka_one_level target)
  target_sources(${target} PRIVATE ${quoka_compiled_cpp})
  target_compile_options(${target} PRIVATE ${quoka_processor})
  if(QUOKA_KERNELS_APART)  # as a build of several levels has them
    target_sources(${target} PRIVATE ${quoka_kernels_cpp})
    set_source_files_properties(${quoka_compiled_cpp} TARGET_DIRECTORY ${target} PROPERTIES
      COMPILE_DEFINITIONS QUOKA_KERNELS_APART COMPILE_OPTIONS $<$<CONFIG:Release>:-O1>)
  endif()
endfunction()

# The sources that quoka_level_sources() found, and the drivers without kernels. Kernels have names that only assembly
# defines, which optimisation at link time does not see.
function(quoka_use_levels target)
  target_sources(${target} PRIVATE ${quoka_compiled_cpp} ${ARGN})
  target_compile_definitions(${target} PRIVATE QUOKA_KERNELS_APART)
  target_compile_options(${target} PRIVATE -fno-lto)
endfunction()

# Sets `result` to the kernels of the static library `target`, and the choice of them, for levels from the most common to
# the best. Each level is compiled with the options and definitions of `target`, then its own.
function(quoka_level_sources target result)
  if(NOT quoka_usual_levels)
    message(FATAL_ERROR "QUOKA_ISA_LEVELS: needs GCC or Clang, GNU binutils and ELF, on x86-64 or aarch64")
  endif()
  set(folder ${CMAKE_CURRENT_BINARY_DIR}/${target})
  set(quiet_intrinsics "")  # GCC 12's false alarm inside its own headers (gcc.gnu.org/PR105593), which -Werror would take
  if(CMAKE_CXX_COMPILER_ID STREQUAL "GNU" AND CMAKE_CXX_COMPILER_VERSION VERSION_LESS 13)
    set(quiet_intrinsics -Wno-uninitialized -Wno-maybe-uninitialized)
  endif()
  set(objects "")
  set(entries "")
  foreach(level IN LISTS ARGN)
    if(NOT DEFINED quoka_flags_of_${level})
      message(FATAL_ERROR "QUOKA_ISA_LEVELS: no ${level}; the usual ones here: ${quoka_usual_levels}")
    endif()
    string(MAKE_C_IDENTIFIER "${level}" suffix)
    set(part ${target}_${suffix})
    add_library(${part} OBJECT EXCLUDE_FROM_ALL ${quoka_kernels_cpp})
    target_link_libraries(${part} PRIVATE quoka)
    target_compile_definitions(${part} PRIVATE $<TARGET_PROPERTY:${target},COMPILE_DEFINITIONS> QUOKA_COMPILED_LEVELS)
    target_compile_options(${part} PRIVATE $<TARGET_PROPERTY:${target},COMPILE_OPTIONS>
      ${quoka_flags_of_${level}} -fno-fast-math -fno-lto
      $<$<CXX_COMPILER_ID:GNU>:-fno-gnu-unique> ${quiet_intrinsics})
    set_target_properties(${part} PROPERTIES POSITION_INDEPENDENT_CODE ON)
    add_custom_command(OUTPUT ${folder}/${suffix}.o ${folder}/${suffix}.entries
      COMMAND ${CMAKE_COMMAND} -D LD=${quoka_level_linker} -D NM=${quoka_level_nm} -D OBJCOPY=${quoka_level_objcopy}
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
  set(${result} ${folder}/dispatch.cpp ${PROJECT_SOURCE_DIR}/include/quoka/compiled_levels.cpp ${objects} PARENT_SCOPE)
endfunction()
