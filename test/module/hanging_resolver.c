/*
 * Preloaded into a test's server: names under hang.test (RFC 6761) are never resolved. The call hangs, as it does
 * where a name server drops what it is asked; all other names go to the C library.
 */
#define _GNU_SOURCE
#include <dlfcn.h>
#include <netdb.h>
#include <string.h>
#include <unistd.h>

int getaddrinfo(const char *host, const char *service, const struct addrinfo *hints, struct addrinfo **result)
{
	int (*real)(const char *, const char *, const struct addrinfo *, struct addrinfo **);

	if (host != NULL && strcmp(host, "hang.test") == 0)
		sleep(600);
	*(void **) &real = dlsym(RTLD_NEXT, "getaddrinfo");
	return real(host, service, hints, result);
}
