// A test program in one header: named cases, checks that say where and what, a main().
//
//   TEST_CASE("a stream runs its copies in order") { CHECK_EQ(1 + 1, 2); }
//
// `program --run NAME` runs one case, `program` all of them. Exit status 0: passed, 1: failed,
// 77: the case skipped itself with SKIP(reason).
#pragma once

#include <cstring>
#include <exception>
#include <functional>
#include <iostream>
#include <sstream>
#include <stdexcept>
#include <string>
#include <vector>

namespace check {

struct Case {
  const char* name;
  void (*body)();
};
struct Failure : std::runtime_error {
  using std::runtime_error::runtime_error;
};
struct Skip : std::runtime_error {
  using std::runtime_error::runtime_error;
};

inline std::vector<Case>& cases() {
  static std::vector<Case> all;
  return all;
}
struct Registration {
  Registration(const char* name, void (*body)()) { cases().push_back({name, body}); }
};

template <typename... Parts>
[[noreturn]] void fail(const char* file, int line, const Parts&... parts) {
  std::ostringstream text;
  text << file << ":" << line << ": ";
  (text << ... << parts);
  throw Failure(text.str());
}

// Runs `body`; fails unless it throws an Expected whose text contains `words`.
template <typename Expected>
void throws(const char* file, int line, const std::function<void()>& body,
            const std::string& words) {
  try {
    body();
  } catch (const Expected& error) {
    if (std::string(error.what()).find(words) == std::string::npos) {
      fail(file, line, "the error says \"", error.what(), "\", expected \"", words, "\" in it");
    }
    return;
  } catch (const std::exception& error) {
    fail(file, line, "an error of another type: ", error.what());
  }
  fail(file, line, "no error, expected one with \"", words, "\"");
}

inline int run_one(const Case& test) {
  try {
    test.body();
    std::cout << "ok    " << test.name << std::endl;
    return 0;
  } catch (const Skip& skip) {
    std::cout << "skip  " << test.name << ": " << skip.what() << std::endl;
    return 77;
  } catch (const std::exception& error) {
    std::cout << "FAIL  " << test.name << "\n      " << error.what() << std::endl;
    return 1;
  }
}

inline int main_of_tests(int argc, char** argv) {
  if (argc == 3 && std::strcmp(argv[1], "--run") == 0) {
    for (const Case& test : cases()) {
      if (std::strcmp(test.name, argv[2]) == 0) return run_one(test);
    }
    std::cout << "no case is named " << argv[2] << std::endl;
    return 2;
  }
  int failed = 0;
  for (const Case& test : cases()) failed += run_one(test) == 1;
  return failed > 0;
}

}  // namespace check

#define CHECK_JOIN_2(a, b) a##b
#define CHECK_JOIN(a, b) CHECK_JOIN_2(a, b)
#define TEST_CASE(name)                                                 \
  static void CHECK_JOIN(case_, __LINE__)();                            \
  static const check::Registration CHECK_JOIN(registration_, __LINE__)( \
      name, CHECK_JOIN(case_, __LINE__));                               \
  static void CHECK_JOIN(case_, __LINE__)()
#define CHECK(condition) \
  ((condition) ? void() : check::fail(__FILE__, __LINE__, "not true: " #condition))
#define CHECK_EQ(got, want)                                                                 \
  do {                                                                                      \
    const auto got_ = (got);                                                                \
    const auto want_ = (want);                                                              \
    if (!(got_ == want_))                                                                   \
      check::fail(__FILE__, __LINE__, #got " is ", got_, ", expected " #want " = ", want_); \
  } while (false)
#define CHECK_THROWS(expression, Type, words) \
  check::throws<Type>(__FILE__, __LINE__, [&] { (void)(expression); }, words)
#define SKIP(reason) throw check::Skip(reason)
