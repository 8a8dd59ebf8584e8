// Code that few settings need. With headers alone such a setting brings a function that leads to its
// code, so that a program which never names the setting does not compile it. The compiled library has
// all of it, and settings bring nothing.
#pragma once

#include <quoka/base/version.hpp>

#if defined(QUOKA_COMPILED)
// What a setting brings.
#define QUOKA_ON_DEMAND(function) nullptr
// What is called: `brought` by the setting, or the library's own.
#define QUOKA_DEMANDED(brought, function) function
#else
// What a setting brings.
#define QUOKA_ON_DEMAND(function) function
// What is called: `brought` by the setting, or the library's own.
#define QUOKA_DEMANDED(brought, function) brought
#endif
