/* What the parts of the launcher share. `exports.map` keeps these names local to mod.so. */
#ifndef EDGE_LAUNCHER_H
#define EDGE_LAUNCHER_H

#include <stdint.h>

enum { MAX_THREADS = 256, CACHE_LINE = 64 };

/* launcher.c: sets the error that the caller of a kernel gets. */
void edge_raise(const char *kind, const char *message);

/* workspace.c; the signatures of the first two are those of TVM's c_backend_api.h. */
void *edge_alloc_workspace(int device_type, int device_id, uint64_t nbytes, int code, int bits);
int edge_free_workspace(int device_type, int device_id, void *block);
void edge_open_workspaces(void);  /* when the library is loaded */
void edge_forked_workspaces(void); /* in a forked child */
void edge_close_workspaces(void); /* when the library is unloaded */

#endif
