# LIBRARY exports the functions that HEADER declares, each with a version, and nothing else.
cmake_minimum_required(VERSION 3.21)

file(STRINGS ${HEADER} lines REGEX "QUOKA_C_API .*quoka_[a-z_]+\\(")
list(TRANSFORM lines REPLACE ".*[ *](quoka_[a-z_]+)\\(.*" "\\1" OUTPUT_VARIABLE declared)
list(SORT declared)
execute_process(COMMAND ${NM} --dynamic --defined-only --format=posix ${LIBRARY}
  OUTPUT_VARIABLE symbols COMMAND_ERROR_IS_FATAL ANY)
string(REGEX MATCHALL "[^\n]+" symbols "${symbols}")
list(FILTER symbols EXCLUDE REGEX "^QUOKA_[0-9.]+(@@QUOKA_[0-9.]+)? A")  # the versions themselves
set(shown "")
foreach(symbol IN LISTS symbols)
  if(NOT symbol MATCHES "^(quoka_[a-z_]+)@@QUOKA_[0-9]+\\.[0-9]+ T ")
    message(FATAL_ERROR "${LIBRARY} shows ${symbol}")
  endif()
  list(APPEND shown ${CMAKE_MATCH_1})
endforeach()
list(SORT shown)
list(LENGTH declared count)
if(count LESS 30 OR NOT declared STREQUAL shown)
  message(FATAL_ERROR "declared: ${declared}\nshown: ${shown}")
endif()
