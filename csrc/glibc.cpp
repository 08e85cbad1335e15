// Lets the library run on glibc 2.28, whatever glibc it was built with (release builds only; see CMakeLists.txt).
//
// glibc 2.34 moved libpthread into libc and gave its functions a new symbol version, and a linker takes the newest
// version. These hidden functions stand before them, for us and for the static libstdc++, and call the version that
// every glibc has. In 2.28 it is in libpthread.so.0, which the library therefore names; newer ones have an empty file
// of that name.
#include <pthread.h>
#include <signal.h>

#define HIDDEN __attribute__((visibility("hidden")))
#define BEFORE(name, version) __asm__(".symver old_" #name ", " #name "@" version)

extern "C" {

BEFORE(pthread_create, "GLIBC_2.2.5");
int old_pthread_create(pthread_t*, const pthread_attr_t*, void* (*)(void*), void*);
HIDDEN int pthread_create(pthread_t* thread, const pthread_attr_t* attributes, void* (*run)(void*), void* argument) {
    return old_pthread_create(thread, attributes, run, argument);
}

BEFORE(pthread_join, "GLIBC_2.2.5");
int old_pthread_join(pthread_t, void**);
HIDDEN int pthread_join(pthread_t thread, void** result) { return old_pthread_join(thread, result); }

BEFORE(pthread_detach, "GLIBC_2.2.5");
int old_pthread_detach(pthread_t) noexcept;
HIDDEN int pthread_detach(pthread_t thread) noexcept { return old_pthread_detach(thread); }

BEFORE(pthread_mutex_trylock, "GLIBC_2.2.5");
int old_pthread_mutex_trylock(pthread_mutex_t*) noexcept;
HIDDEN int pthread_mutex_trylock(pthread_mutex_t* mutex) noexcept { return old_pthread_mutex_trylock(mutex); }

BEFORE(pthread_sigmask, "GLIBC_2.2.5");
int old_pthread_sigmask(int, const sigset_t*, sigset_t*) noexcept;
HIDDEN int pthread_sigmask(int how, const sigset_t* wanted, sigset_t* before) noexcept {
    return old_pthread_sigmask(how, wanted, before);
}

BEFORE(pthread_setname_np, "GLIBC_2.12");
int old_pthread_setname_np(pthread_t, const char*) noexcept;
HIDDEN int pthread_setname_np(pthread_t thread, const char* name) noexcept {
    return old_pthread_setname_np(thread, name);
}

// glibc 2.32's flag, with which libstdc++ counts references without atomics in a process of one thread: here always
// with them
HIDDEN extern char __libc_single_threaded;
char __libc_single_threaded = 0;
}
