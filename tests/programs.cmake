# Tests of everything that is built on the library: the programs of examples/, fuzzers, packages, pages. Included by
# CMakeLists.txt where QUOKA_TEST_PROGRAMS is ON; ctest -L programs runs these alone.
get_property(tests_before DIRECTORY PROPERTY TESTS)

# ---- fuzzers --------------------------------------------------------------------------------------------

# The fuzzers on inputs that were kept, and by libFuzzer.
add_test_program(fuzz_tests outside fuzz/replay_test.cpp)
if(TARGET fuzz_tests)
  target_sources(fuzz_tests PRIVATE ${PROJECT_SOURCE_DIR}/examples/bindings/ggml/settings.cpp)
  target_compile_definitions(fuzz_tests PRIVATE QUOKA_FUZZ_CORPUS="${CMAKE_CURRENT_SOURCE_DIR}/fuzz/corpus")
endif()
if(QUOKA_BUILD_FUZZERS)
  add_subdirectory(fuzz)
endif()

# ---- the programs of examples/ --------------------------------------------------------------------------

file(GLOB sources CONFIGURE_DEPENDS programs/*_test.cpp)
list(FILTER sources EXCLUDE REGEX "(safetensors|gguf_file)_test")  # a leg of .ci/run takes them and wants no selectors by name
list(FILTER sources EXCLUDE REGEX "small_model_test")  # whose products of matrices, in headers, want an optimiser
if(TARGET quoka_methods)
  add_test_program(programs_tests outside ${sources} LIBRARIES quoka_methods)
  if(QUOKA_TEST_SLOW)
    add_test_program(small_model_test inside programs/small_model_test.cpp LIBRARIES quoka_methods)
  endif()
  add_test_program(files_tests outside programs/safetensors_test.cpp programs/gguf_file_test.cpp LIBRARIES quoka_support)
endif()
add_test_program(context_parallel_tests outside
  ${PROJECT_SOURCE_DIR}/examples/context_parallel/tests/sharded_prefill_test.cpp)
if(TARGET programs_tests)
  target_compile_definitions(programs_tests PRIVATE QUOKA_PROGRAMS_DATA="${CMAKE_CURRENT_SOURCE_DIR}/programs/data")
endif()
if(TARGET quoka_ggml_engine)
  enable_language(C)
  add_library(quoka_ik_llama OBJECT EXCLUDE_FROM_ALL ${PROJECT_SOURCE_DIR}/examples/bindings/ik_llama/quoka_flash_attn.c)
  set_target_properties(quoka_ik_llama PROPERTIES C_STANDARD 11)
  target_link_libraries(quoka_ik_llama PRIVATE quoka_ggml_headers)
  target_include_directories(quoka_ik_llama PRIVATE ${PROJECT_SOURCE_DIR}/include)
  add_test_folder(ggml outside LIBRARIES quoka_ggml quoka_ggml_engine quoka_support quoka_ik_llama quoka_c)
  add_subdirectory(ggml)
endif()

# The operator for ONNX Runtime is compiled where its header is (get_header.sh), and run where examples/bindings/onnxruntime/test.sh
# has made an environment with the runtime, 60 MB, and with hypothesis, which older ones lack.
wanted(onnxruntime is_wanted)
if(TARGET onnxruntime-quoka AND is_wanted)
  add_dependencies(quoka_tests onnxruntime-quoka)
  set(python ${PROJECT_SOURCE_DIR}/build/onnxruntime_test/bin/python)
  set(lacks TRUE)
  if(EXISTS ${python})
    execute_process(COMMAND ${python} -c "import hypothesis" RESULT_VARIABLE lacks ERROR_QUIET)
  endif()
  if(NOT lacks AND NOT CMAKE_CXX_FLAGS MATCHES "sanitize")
    foreach(name operator genai)
      add_test(NAME onnxruntime.${name}
        COMMAND ${python} -B ${PROJECT_SOURCE_DIR}/examples/bindings/onnxruntime/tests/test_${name}.py)
      set_tests_properties(onnxruntime.${name} PROPERTIES
        ENVIRONMENT QUOKA_ONNXRUNTIME_LIBRARY=$<TARGET_FILE:onnxruntime-quoka>)
    endforeach()
  endif()
endif()

# ---- a selector and a format, added as CONTRIBUTING.md says ------------------------------------------

wanted(contributing is_wanted)
if(is_wanted AND CMAKE_CXX_COMPILER_ID MATCHES "GNU|Clang" AND NOT CMAKE_CROSSCOMPILING)
  add_test(NAME contributing COMMAND ${CMAKE_COMMAND} ${of_the_compiler} -D SOURCE=${PROJECT_SOURCE_DIR}
    -D WORK=${CMAKE_CURRENT_BINARY_DIR}/contributing -P ${CMAKE_CURRENT_SOURCE_DIR}/contributing/check.cmake)
  set_tests_properties(contributing PROPERTIES SKIP_REGULAR_EXPRESSION "neither git nor patch: skipped")
endif()

# ---- pages, scripts and packages, by Python; each script says what it tests --------------------------

function(add_script_test name script)  # and its arguments
  wanted(${name} is_wanted)
  if(is_wanted AND Python3_FOUND)
    add_test(NAME ${name} COMMAND ${Python3_EXECUTABLE} -B ${script} ${ARGN})
  endif()
endfunction()
set(here ${CMAKE_CURRENT_SOURCE_DIR})
add_script_test(results_tables ${PROJECT_SOURCE_DIR}/bench/tables.py --check)
add_script_test(settings_table ${here}/settings_table_test.py)
add_script_test(ggml.estimate ${here}/estimate_test.py)
if(UNIX)
  add_script_test(get_model ${here}/get_model_test.py)
endif()
find_program(CHROMIUM chromium)
if(CHROMIUM)
  add_script_test(report ${here}/report_test.py ${CHROMIUM})
  add_script_test(ggml.check_page ${here}/check_page_test.py ${CHROMIUM})
endif()
if(CMAKE_CXX_COMPILER_ID MATCHES "GNU|Clang")
  get_target_property(eigen Eigen3::Eigen INTERFACE_INCLUDE_DIRECTORIES)
  add_script_test(page_snippets ${here}/page_snippets_test.py ${CMAKE_CXX_COMPILER} ${eigen} ${CMAKE_CURRENT_BINARY_DIR})
  if(NOT CMAKE_CROSSCOMPILING)
    separate_arguments(flags UNIX_COMMAND "${CMAKE_CXX20_STANDARD_COMPILE_OPTION} ${CMAKE_CXX_FLAGS}")
    add_script_test(packaging.single_header ${here}/packaging/single_header.py ${CMAKE_CURRENT_BINARY_DIR}/single_header
      ${eigen} ${CMAKE_CXX_COMPILER} ${flags})
    add_script_test(packaging.conan ${here}/packaging/conan.py conan ${CMAKE_CURRENT_BINARY_DIR}/conan ${eigen})
    if(TEST packaging.conan)
      set_tests_properties(packaging.conan PROPERTIES SKIP_REGULAR_EXPRESSION "there is no conan: skipped")
    endif()
  endif()
endif()

label_tests(programs ${tests_before})
if(TEST check_run_test AND NOT QUOKA_TEST_SLOW)  # without those that run `check` several times
  foreach(half check_run_test check_run_test.second_half)
    set_property(TEST ${half} APPEND PROPERTY ENVIRONMENT "GTEST_FILTER=-*.OnlyMeasures:*.LeavesHurtLayers*:*.RefinesWhat*")
  endforeach()
endif()
# Begun first: what takes a quarter of a minute and more.
foreach(test real_model_test server_test server_test.second_half ggml.architectures check_run_test check_run_test.second_half llama_test
    llama_test.second_half packaging.single_header)
  if(TEST ${test})
    set_tests_properties(${test} PROPERTIES COST 100)
  endif()
endforeach()
