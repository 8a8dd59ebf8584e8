# Builds and runs little.cpp with what quoka.pc in PC_DIR says and nothing else.
set(ENV{PKG_CONFIG_PATH} ${PC_DIR})
execute_process(COMMAND ${PKG_CONFIG} --modversion quoka
  OUTPUT_VARIABLE version OUTPUT_STRIP_TRAILING_WHITESPACE COMMAND_ERROR_IS_FATAL ANY)
if(NOT version STREQUAL VERSION)
  message(FATAL_ERROR "quoka.pc says version ${version}, not ${VERSION}")
endif()
execute_process(COMMAND ${PKG_CONFIG} --cflags --libs quoka
  OUTPUT_VARIABLE from_pc OUTPUT_STRIP_TRAILING_WHITESPACE COMMAND_ERROR_IS_FATAL ANY)
separate_arguments(flags UNIX_COMMAND "${FLAGS} ${from_pc}")
execute_process(COMMAND ${CXX} ${CMAKE_CURRENT_LIST_DIR}/little.cpp ${flags} -o ${OUT} COMMAND_ERROR_IS_FATAL ANY)
execute_process(COMMAND ${OUT} COMMAND_ERROR_IS_FATAL ANY)
