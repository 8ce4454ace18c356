/* Stands in for pyxis where there is no enroot: takes the same options, refuses what pyxis 0.24 refuses, and runs the
 * task on the host with the environment a container would give it. Each step leaves one JSON line a node in
 * DIRECTORY/containers.jsonl. Loaded by plugstack.conf: required pyxis_stand_in.so DIRECTORY
 *
 * An image file has, after the header of a squashfs, NAME=value lines: the environment that the image sets.
 * An image without a path is taken to be in a registry that has everything. A container has no Slurm in it: its tasks
 * do not find the controller. Tasks start in a directory that is mounted, or in one that every image has. Where
 * DIRECTORY/full-NODE exists, the node has no room for an image. */
#include <errno.h>
#include <limits.h>
#include <slurm/spank.h>
#include <stdbool.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>
#include <unistd.h>

SPANK_PLUGIN(pyxis, 24)

enum kind { IMAGE, MOUNTS, WORKDIR, NAME, SAVE, ENV, UNSHARE, MOUNT_HOME, REMAP_ROOT, ENTRYPOINT, ENTRYPOINT_LOG,
            WRITABLE, KINDS };
static const char *const keys[KINDS] = {"image", "mounts", "workdir", "name", "save", "env", "unshare", "mount_home",
                                        "remap_root", "entrypoint", "entrypoint_log", "writable"};
static char *asked[KINDS];

static bool contained(void) { return asked[IMAGE] != NULL || asked[NAME] != NULL; }
static bool is_path(const char *text) { return *text == '/' || *text == '.'; }
#define refuse(...) (slurm_error("pyxis: " __VA_ARGS__), -1)

/* Calls `check` with each part of a comma-separated list, until one refuses. */
static int each(const char *list, int (*check)(char *part))
{
    char *copy = strdup(list), *rest = copy, *part;
    int result = 0;
    while (result == 0 && (part = strsep(&rest, ",")) != NULL)
        result = check(part);
    free(copy);
    return result;
}

static bool among(const char *list, const char *name)
{
    size_t length = strlen(name);
    for (const char *at = list; at != NULL; at = strchr(at, ',') ? strchr(at, ',') + 1 : NULL)
        if (strncmp(at, name, length) == 0 && (at[length] == ',' || at[length] == '\0'))
            return true;
    return false;
}

static int check_mount(char *entry)
{
    char *rest = entry, *source = strsep(&rest, ":"), *target = rest ? strsep(&rest, ":") : source;
    if (*source == '\0' || *target == '\0')
        return refuse("--container-mounts: invalid format: %s:%s", source, target);
    if (!is_path(source) && strcmp(source, "tmpfs") != 0 && strcmp(source, "umount") != 0)
        return refuse("mount source must be a relative path, an absolute path, \"tmpfs\" or \"umount\": %s", source);
    return is_path(target) ? 0 : refuse("mount target must be a relative path or an absolute path: %s", target);
}

static int check_mount_source(char *entry)
{
    char *source = strsep(&entry, ":");
    struct stat found;
    bool gone = *source == '/' && stat(source, &found) != 0 && (errno == ENOENT || errno == ENOTDIR);
    return gone ? refuse("--container-mounts: source path does not exist: %s", source) : 0;
}

/* Whether a mount holds the directory that tasks are to start in. */
static int holds_workdir(char *entry)
{
    char *source = strsep(&entry, ":"), *target = entry ? strsep(&entry, ":") : source;
    size_t length = strlen(target);
    return strncmp(asked[WORKDIR], target, length) == 0 && strchr("/", asked[WORKDIR][length]) != NULL;
}

/* Called for each option on the command line, twice for some, and again on the node. */
static int take(int value, const char *argument, int remote)
{
    enum kind kind = value / 2;
    const char *text = kind < MOUNT_HOME ? argument : value % 2 ? "true" : "false", *flag;
    if (text == NULL || *text == '\0')
        return refuse("--container-%s: argument required", keys[kind]);
    if (asked[kind] != NULL && strcmp(asked[kind], text) != 0)
        return refuse("--container-%s specified twice, as %s and %s", keys[kind], asked[kind], text);
    if (kind == MOUNTS && each(text, check_mount) != 0)
        return -1;
    if (kind == NAME && (*text == ':' || ((flag = strchr(text, ':')) && !among("auto,create,exec,no_exec", flag + 1))))
        return refuse("--container-name: flag must be \"auto\", \"create\", \"exec\" or \"no_exec\", name not empty");
    free(asked[kind]);
    asked[kind] = strdup(text);
    return 0;
}

#define TEXT(kind, option, form) {option, form, "[pyxis stand-in] see pyxis", 1, (kind) * 2, take}
#define FLAG(kind, option, on) {option, NULL, "[pyxis stand-in] see pyxis", 0, (kind) * 2 + (on), take}
#define SWITCH(kind, option) FLAG(kind, "container-" option, 1), FLAG(kind, "no-container-" option, 0)
static struct spank_option options[] = {
    TEXT(IMAGE, "container-image", "[USER@][REGISTRY#]IMAGE[:TAG]|PATH"),
    TEXT(MOUNTS, "container-mounts", "SRC:DST[:FLAGS][,SRC:DST...]"),
    TEXT(NAME, "container-name", "NAME[:auto|create|exec|no_exec]"),
    TEXT(WORKDIR, "container-workdir", "PATH"), TEXT(SAVE, "container-save", "PATH"),
    TEXT(ENV, "container-env", "NAME[,NAME...]"), TEXT(UNSHARE, "container-unshare", "NS[,NS...]"),
    SWITCH(MOUNT_HOME, "mount-home"), SWITCH(REMAP_ROOT, "remap-root"), SWITCH(ENTRYPOINT, "entrypoint"),
    FLAG(ENTRYPOINT_LOG, "container-entrypoint-log", 1),
    FLAG(WRITABLE, "container-writable", 1), FLAG(WRITABLE, "container-readonly", 0),
    SPANK_OPTIONS_TABLE_END};

int slurm_spank_init(spank_t spank, int count, char **arguments)
{
    if (count != 1)
        return refuse("plugstack.conf must name the directory of the records");
    for (struct spank_option *option = options; option->name != NULL; option++)
        if (spank_option_register(spank, option) != ESPANK_SUCCESS)
            return refuse("could not register --%s", option->name);
    return 0;
}

static void write_json(FILE *out, const char *key, const char *value)
{
    fprintf(out, ", \"%s\": \"", key);
    for (const unsigned char *at = (const unsigned char *)value; *at; at++)
        fprintf(out, *at < 0x20 ? "\\u%04x" : *at == '"' || *at == '\\' ? "\\%c" : "%c", *at);
    fputc('"', out);
}

/* Once a node and step. The line leaves in one write, so those of several nodes do not mix. */
int slurm_spank_user_init(spank_t spank, int count, char **arguments)
{
    char text[PATH_MAX];
    uint32_t job = 0, step = 0, restarts = 0;
    if (!contained())
        return 0;
    snprintf(text, sizeof text, "%s/containers.jsonl", arguments[0]);
    FILE *out = fopen(text, "a");
    if (out == NULL)
        return refuse("could not record the step in %s: %m", text);
    setvbuf(out, NULL, _IOFBF, 1 << 16);
    spank_get_item(spank, S_JOB_ID, &job);
    spank_get_item(spank, S_JOB_STEPID, &step);
    spank_get_item(spank, S_SLURM_RESTART_COUNT, &restarts);
    gethostname(text, sizeof text);
    fprintf(out, "{\"job\": %u, \"step\": %d, \"restart\": %u", job, (int)step, restarts);
    write_json(out, "node", text);
    for (enum kind kind = 0; kind < KINDS; kind++)
        if (asked[kind] != NULL)
            write_json(out, keys[kind], asked[kind]);
    fputs("}\n", out);
    return fclose(out);
}

/* As enroot and pyxis tell of a node without room for the image. */
static int no_room(const char *directory)
{
    char host[HOST_NAME_MAX + 1], mark[PATH_MAX];
    gethostname(host, sizeof host);
    snprintf(mark, sizeof mark, "%s/full-%s", directory, host);
    if (access(mark, F_OK) != 0)
        return 0;
    slurm_error("pyxis: child 7 failed with error code: 1");
    slurm_error("pyxis: failed to create container filesystem for image: %s", asked[IMAGE]);
    slurm_error("pyxis: printing enroot log file:");
    slurm_error("pyxis:     [INFO] Extracting squashfs filesystem...");
    slurm_error("pyxis:     Write on output file failed because No space left on device");
    return refuse("couldn't start container");
}

/* The image's values win, except over the names of --container-env. */
static int enter_image(spank_t spank)
{
    char line[4096], unused[8];
    FILE *image = fopen(asked[IMAGE], "r");
    if (image == NULL)
        return refuse("failed to create container filesystem for image: %s: %m", asked[IMAGE]);
    while (fgets(line, sizeof line, image) != NULL) {
        line[strcspn(line, "\n")] = '\0';
        char *value = strchr(line, '=');
        if (value == NULL || *line == '#')
            continue;
        *value++ = '\0';
        bool set = spank_getenv(spank, line, unused, sizeof unused) != ESPANK_ENV_NOEXIST;
        if (!set || asked[ENV] == NULL || !among(asked[ENV], line))
            spank_setenv(spank, line, value, 1);
    }
    fclose(image);
    return 0;
}

/* In each task, last before its program. An error here, unlike one in user_init, reaches srun. */
int slurm_spank_task_init(spank_t spank, int count, char **arguments)
{
    char value[16], *mounts = asked[MOUNTS] ? asked[MOUNTS] : "tmpfs:/dev/shm"; /* as enroot does */
    if (!contained())
        return 0;
    for (const char *const *name = (const char *const[]){"LANG", "LANGUAGE", "LC_ALL", NULL}; *name != NULL; name++)
        if (asked[ENV] == NULL || !among(asked[ENV], *name))
            spank_unsetenv(spank, *name);
    if (each(mounts, check_mount_source) != 0)
        return -1;
    if (asked[IMAGE] != NULL && no_room(arguments[0]) != 0)
        return -1;
    if (asked[IMAGE] != NULL && is_path(asked[IMAGE]) && enter_image(spank) != 0)
        return -1;
    if (asked[IMAGE] != NULL && !is_path(asked[IMAGE]) && strstr(asked[IMAGE], ".sqsh") != NULL)
        return refuse("failed to import docker image: %s (a path begins with / or ./)", asked[IMAGE]);
    if (spank_getenv(spank, "PYTORCH_VERSION", value, sizeof value) != ESPANK_ENV_NOEXIST) {
        spank_getenv(spank, "SLURM_PROCID", value, sizeof value);
        spank_setenv(spank, "RANK", value, 1);
        spank_getenv(spank, "SLURM_LOCALID", value, sizeof value);
        spank_setenv(spank, "LOCAL_RANK", value, 1);
    }
    if (asked[WORKDIR] != NULL && !among("/,/tmp,/usr", asked[WORKDIR]) && each(mounts, holds_workdir) == 0)
        return refuse("couldn't chdir to %s: not in the container", asked[WORKDIR]);
    if (asked[WORKDIR] != NULL && chdir(asked[WORKDIR]) != 0)
        return refuse("couldn't chdir to %s: %m", asked[WORKDIR]);
    spank_setenv(spank, "SLURM_CONF", "/dev/null", 1);
    return 0;
}
