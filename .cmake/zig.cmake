# Other systems by one compiler (.ci/get_zig.sh): -DQUOKA_ZIG_TARGET=x86_64-linux-gnu.2.17, x86_64-linux-musl,
# x86_64-windows-gnu, aarch64-macos or another that `zig targets` lists.
if(CMAKE_CXX_COMPILER_LOADED)  # included once more, when the compiler is known
  list(APPEND CMAKE_CXX_IMPLICIT_INCLUDE_DIRECTORIES /usr/include)  # no other system's headers
  return()
endif()
set(CMAKE_PROJECT_quoka_INCLUDE ${CMAKE_CURRENT_LIST_FILE})
set(CMAKE_TRY_COMPILE_PLATFORM_VARIABLES QUOKA_ZIG_TARGET)
if(NOT QUOKA_ZIG_TARGET MATCHES "^([a-z0-9_]+)-(linux|windows|macos)-?(.*)$")
  message(FATAL_ERROR "QUOKA_ZIG_TARGET is \"${QUOKA_ZIG_TARGET}\", but must be as x86_64-linux-gnu.2.17")
endif()
set(CMAKE_SYSTEM_PROCESSOR ${CMAKE_MATCH_1})
set(CMAKE_SYSTEM_NAME Linux)
if(CMAKE_MATCH_2 STREQUAL windows)
  set(CMAKE_SYSTEM_NAME Windows)
elseif(CMAKE_MATCH_2 STREQUAL macos)
  set(CMAKE_SYSTEM_NAME Darwin)
  set(CMAKE_TRY_COMPILE_TARGET_TYPE STATIC_LIBRARY)  # or Zig would build a C++ library, and nothing is linked here
endif()
set(quoka_zig ${CMAKE_CURRENT_LIST_DIR}/../build/zig)
foreach(language IN ITEMS C CXX)
  set(CMAKE_${language}_COMPILER_TARGET ${QUOKA_ZIG_TARGET})
  set(CMAKE_${language}_FLAGS_INIT -fno-sanitize=undefined)  # which it asks for where nothing is optimised
endforeach()
set(CMAKE_C_COMPILER ${quoka_zig}/cc)
set(CMAKE_CXX_COMPILER ${quoka_zig}/c++)
foreach(tool IN ITEMS OBJCOPY:objcopy NM:nm STRIP:strip)  # for ISA levels: GNU's
  string(REGEX MATCH "([A-Z]+):(.*)" tool ${tool})
  set(CMAKE_${CMAKE_MATCH_1} /usr/bin/${CMAKE_SYSTEM_PROCESSOR}-linux-gnu-${CMAKE_MATCH_2})
endforeach()
set(CMAKE_INSTALL_NAME_TOOL /bin/true)  # macOS's, for what would be installed
set(CMAKE_AR ${quoka_zig}/ar)
set(CMAKE_RANLIB ${quoka_zig}/ranlib)
set(CMAKE_CXX_STANDARD_INCLUDE_DIRECTORIES ${quoka_zig}/include)  # this machine's nlohmann_json, fmt and CLI11, which lie beside its C library
