/*
 * Preloaded with ASan's library into a server that was not built with it. ASan sets itself up at the process's first
 * malloc. Left alone that is libgpg-error's constructor (the server links it by way of libldap), inside
 * bindtextdomain's lock, where ASan's own dlerror() asks gettext for the same lock and leaves it broken for ever. This
 * library's constructor comes before all others (linked with -z initfirst) and allocates in peace.
 */
#include <stdlib.h>

__attribute__((constructor)) static void allocate_first(void)
{
	void *volatile memory = malloc(1);

	free(memory);
}
