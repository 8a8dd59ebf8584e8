#!/usr/bin/env bash
# Builds the Debian package libquoka-dev from this tree, checks it, and uses it:
#
#     debian.sh [--to DIR]       DIR, if given, keeps the package
#
# dpkg-buildpackage; lintian, for which a warning is a failure; a program, compiled by find_package and by pkg-config
# against what the package holds. Installs what this needs and is missing; libquoka-dev itself is unpacked, not installed.
set -euo pipefail
source "$(dirname "${BASH_SOURCE[0]}")/../../.ci/setup.sh"
cd "$quoka_root"

to=
case ${1-} in
  '') ;;
  --to) to=${2:?--to DIR} ;;
  *) echo "debian.sh: no option $1, only --to DIR" >&2 && exit 2 ;;
esac
install_missing build-essential cmake libeigen3-dev dpkg-dev debhelper fakeroot lintian pkg-config

version=$(quoka_version)
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
tar --sort=name --owner=0 --group=0 --numeric-owner --mtime=2026-01-01 --transform "s,^,quoka-$version/," \
  -cf - CMakeLists.txt LICENSE .cmake include | gzip -n >"$work/quoka_$version.orig.tar.gz"
tar -C "$work" -xf "$work/quoka_$version.orig.tar.gz"
cp -r examples/packaging/debian "$work/quoka-$version/"
(cd "$work/quoka-$version" && dpkg-buildpackage --no-sign >"$work/log" 2>&1) || { cat "$work/log" >&2; exit 1; }

# An upload to Debian closes the bug that asks for the package; this one is not an upload.
as_user=()
((EUID)) || as_user=(--allow-root)
lintian "${as_user[@]}" --fail-on error,warning --suppress-tags initial-upload-closes-no-bugs "$work"/*.changes

root=$work/root
dpkg-deb -x "$work"/libquoka-dev_*_all.deb "$root"
differ=$(diff -rq include/quoka "$root/usr/include/quoka" | grep -v 'README.md$\|compiled_levels.cpp$' || true)
[[ -z $differ ]] || { echo "The package's headers are not the tree's: $differ" >&2; exit 1; }
# The headers are the tree's, so a part of them is enough.
cmake -S tests/consumer -B "$work/consumer" -DQUOKA_WANTED="$version" -DCMAKE_PREFIX_PATH="$root/usr" -DQUOKA_MAIN=little.cpp \
  -DCMAKE_BUILD_TYPE=Debug -DCMAKE_CXX_FLAGS_DEBUG="-O0 -DQUOKA_ALLOW_UNOPTIMIZED" >"$work/log"
grep -q "^quoka_DIR:PATH=$root/" "$work/consumer/CMakeCache.txt" || { echo "find_package took another quoka" >&2; exit 1; }
cmake --build "$work/consumer" >>"$work/log" || { cat "$work/log" >&2; exit 1; }
"$work/consumer/consumer"
cmake -D CXX=c++ -D FLAGS="-std=c++20 -O0 -DQUOKA_ALLOW_UNOPTIMIZED" -D PKG_CONFIG=pkg-config -D PC_DIR="$root/usr/share/pkgconfig" \
  -D VERSION="$version" -D OUT="$work/by_pkg_config" -P tests/consumer/pkg_config.cmake

[[ -z $to ]] || { mkdir -p "$to" && cp "$work"/libquoka-dev_*_all.deb "$to"; }
echo "libquoka-dev $(dpkg-deb -f "$work"/libquoka-dev_*_all.deb Version): built, checked and used"
