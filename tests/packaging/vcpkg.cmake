# Stands in for vcpkg: runs PORT_DIR/portfile.cmake into PACKAGES by functions of vcpkg's names. They do what vcpkg's
# reference says of them, and refuse arguments that it does not name; vcpkg's own were not at hand.
#
#   cmake -D PORT_DIR=... -D PACKAGES=... -D BUILD=... -D "OPTIONS=..." -P vcpkg.cmake
cmake_minimum_required(VERSION 3.21)
set(PORT quoka)
set(CURRENT_PORT_DIR ${PORT_DIR})
set(CURRENT_PACKAGES_DIR ${PACKAGES})

macro(read_arguments function single multiple)
  cmake_parse_arguments(arg "" "${single}" "${multiple}" ${ARGN})
  if(arg_UNPARSED_ARGUMENTS)
    message(FATAL_ERROR "${function}: no argument ${arg_UNPARSED_ARGUMENTS}")
  endif()
endmacro()

function(vcpkg_cmake_configure)
  read_arguments(vcpkg_cmake_configure "SOURCE_PATH" "OPTIONS" ${ARGN})
  execute_process(COMMAND ${CMAKE_COMMAND} -S ${arg_SOURCE_PATH} -B ${BUILD} -DCMAKE_INSTALL_PREFIX=${PACKAGES}
    -DCMAKE_BUILD_TYPE=Release ${OPTIONS} ${arg_OPTIONS} OUTPUT_QUIET COMMAND_ERROR_IS_FATAL ANY)
endfunction()

function(vcpkg_cmake_install)
  execute_process(COMMAND ${CMAKE_COMMAND} --build ${BUILD} --target install OUTPUT_QUIET COMMAND_ERROR_IS_FATAL ANY)
endfunction()

# To share/PORT, where find_package looks in vcpkg: the files then find the prefix two folders above, not three.
function(vcpkg_cmake_config_fixup)
  read_arguments(vcpkg_cmake_config_fixup "CONFIG_PATH;PACKAGE_NAME" "" ${ARGN})
  cmake_path(GET arg_CONFIG_PATH PARENT_PATH parent)
  file(RENAME ${PACKAGES}/${arg_CONFIG_PATH} ${PACKAGES}/share/${PORT})
  file(REMOVE_RECURSE ${PACKAGES}/${parent})
  file(READ ${PACKAGES}/share/${PORT}/quokaTargets.cmake targets)
  set(up "get_filename_component(_IMPORT_PREFIX \"\${_IMPORT_PREFIX}\" PATH)\n")
  string(REPLACE "${up}${up}${up}" "${up}${up}" moved "${targets}")
  if(moved STREQUAL targets)
    message(FATAL_ERROR "quokaTargets.cmake does not look for its prefix three folders above ${arg_CONFIG_PATH}")
  endif()
  file(WRITE ${PACKAGES}/share/${PORT}/quokaTargets.cmake "${moved}")
endfunction()

function(vcpkg_fixup_pkgconfig)
  file(GLOB_RECURSE files ${PACKAGES}/*.pc)
  foreach(file IN LISTS files)
    if(NOT file MATCHES "/(share|lib)/pkgconfig/")
      message(FATAL_ERROR "vcpkg does not look for ${file}")
    endif()
  endforeach()
endfunction()

function(vcpkg_install_copyright)
  read_arguments(vcpkg_install_copyright "COMMENT" "FILE_LIST" ${ARGN})
  file(INSTALL ${arg_FILE_LIST} DESTINATION ${PACKAGES}/share/${PORT} RENAME copyright)
endfunction()

file(REMOVE_RECURSE ${PACKAGES} ${BUILD})
include(${PORT_DIR}/portfile.cmake)
