# vcpkg, an overlay port of the tree that it lies in:
#
#   vcpkg install quoka --overlay-ports=<this folder>
#
# The test packaging.recipes runs this file with stand-ins for vcpkg's functions. vcpkg itself has not run it.
set(VCPKG_BUILD_TYPE release)  # headers alone
get_filename_component(SOURCE_PATH "${CURRENT_PORT_DIR}/../../.." ABSOLUTE)

vcpkg_cmake_configure(SOURCE_PATH "${SOURCE_PATH}")
vcpkg_cmake_install()
vcpkg_cmake_config_fixup(CONFIG_PATH share/cmake/quoka)
vcpkg_fixup_pkgconfig()

file(REMOVE_RECURSE "${CURRENT_PACKAGES_DIR}/share/doc")  # the licence, which vcpkg has elsewhere
file(INSTALL "${CURRENT_PORT_DIR}/usage" DESTINATION "${CURRENT_PACKAGES_DIR}/share/${PORT}")
vcpkg_install_copyright(FILE_LIST "${SOURCE_PATH}/LICENSE")
