// Does a class have a member of that name, whatever it is: a function of any signature, overloaded or a
// template, a constant, a type? For optional members of a user's type: one that is there and does not fit is
// an error in words, and not taken for absent.
//
//   QUOKA_DEFINE_HAS_MEMBER(narrow)    at namespace scope
//   has_narrow<Row>                    true or false
//
// A class that derives from T and from one that has the name has it twice: naming it is ambiguous, and a
// constraint sees that. Of a final class only members that are not overloaded are seen.
#pragma once

#include <quoka/base/version.hpp>

#include <type_traits>

#define QUOKA_DEFINE_HAS_MEMBER(name)      \
  struct Name_##name {                     \
    int name;                              \
  };                                       \
  template <class T>                       \
  struct Twice_##name : T, Name_##name {}; \
  template <class T>                       \
  constexpr bool find_##name() {           \
    if constexpr (!std::is_class_v<T>)     \
      return false;                        \
    else if constexpr (std::is_final_v<T>) \
      return requires { &T::name; }        \
    || requires { typename T::name; };     \
    else return !requires {                \
      &Twice_##name<T>::name;              \
    };                                     \
  }                                        \
  template <class T>                       \
  inline constexpr bool has_##name = find_##name<std::remove_cvref_t<T>>()
