# The API reference, where Doxygen is found: the target docs writes build/docs/html, the test docs does the same and
# fails for a public name without a comment.
find_package(Doxygen 1.9.3 QUIET)
find_package(Python3 QUIET COMPONENTS Interpreter)
if(NOT DOXYGEN_FOUND OR NOT Python3_FOUND)
  return()
endif()

function(quoka_add_docs)
  set(docs_dir ${PROJECT_SOURCE_DIR}/.cmake/docs)
  set(quoka_docs ${PROJECT_BINARY_DIR}/docs)
  set(docs_excluded kernels simd)  # not public
  list(TRANSFORM docs_excluded PREPEND ${PROJECT_SOURCE_DIR}/include/quoka/)
  list(JOIN docs_excluded " " docs_excluded)
  # The interpreter itself: a wrapper in its place would start it again for every header.
  execute_process(COMMAND ${Python3_EXECUTABLE} -c "import sys; print(sys.executable)"
    OUTPUT_VARIABLE docs_python OUTPUT_STRIP_TRAILING_WHITESPACE)
  configure_file(${docs_dir}/Doxyfile.in ${quoka_docs}/Doxyfile @ONLY)
  add_custom_target(docs COMMAND ${DOXYGEN_EXECUTABLE} ${quoka_docs}/Doxyfile
    COMMENT "API reference: ${quoka_docs}/html/index.html" VERBATIM)
  if(QUOKA_TEST_PROGRAMS AND QUOKA_BUILD_TESTS AND "docs" MATCHES "${QUOKA_TEST_FILTER}")
    add_test(NAME docs COMMAND ${DOXYGEN_EXECUTABLE} ${quoka_docs}/Doxyfile)
    set_tests_properties(docs PROPERTIES LABELS programs)
  endif()
endfunction()
quoka_add_docs()
