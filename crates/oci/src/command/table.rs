//! The verbs and their flags.

use super::context::{Run, Verb};
use super::flag::{BUNDLE, CONSOLE, DETACH, Flag, HELP, KEYRING, NO_PIVOT, PID_FILE, Takes};
use super::{checkpoint, update, verb};

use Takes::{Many, Nothing, One};

const PIDFD: Flag = ("pidfd-socket", "", One, "socket that receives a pidfd of the process");
const PRESERVE: Flag = ("preserve-fds", "", One, "how many descriptors from 3 on are passed on");
const FORMAT: Flag = ("format", "f", One, "table or json");

/// All verbs.
pub(super) const VERBS: &[Verb] = &[
    Verb {
        name: "create",
        words: "ID",
        what: "make a container that waits for start",
        flags: &[BUNDLE, CONSOLE, PID_FILE, PIDFD, NO_PIVOT, KEYRING, PRESERVE, HELP],
        run: Run::With(verb::create),
    },
    Verb {
        name: "start",
        words: "ID",
        what: "run the program of a created container",
        flags: &[HELP],
        run: Run::With(verb::start),
    },
    Verb {
        name: "run",
        words: "ID",
        what: "create and start a container, and wait for it",
        flags: &[
            BUNDLE,
            CONSOLE,
            DETACH,
            ("keep", "", Nothing, "do not delete it when it has ended"),
            PID_FILE,
            PIDFD,
            ("no-subreaper", "", Nothing, "accepted without effect"),
            NO_PIVOT,
            KEYRING,
            PRESERVE,
            HELP,
        ],
        run: Run::With(verb::run),
    },
    Verb {
        name: "state",
        words: "ID",
        what: "print the state of a container",
        flags: &[HELP],
        run: Run::With(verb::state),
    },
    Verb {
        name: "kill",
        words: "ID [SIGNAL]",
        what: "send a signal to the first process, SIGTERM if not given",
        flags: &[("all", "a", Nothing, "to all processes"), HELP],
        run: Run::With(verb::kill),
    },
    Verb {
        name: "delete",
        words: "ID...",
        what: "remove containers that have ended or were never started",
        flags: &[("force", "f", Nothing, "running ones, too, and no error if there is none"), HELP],
        run: Run::With(verb::delete),
    },
    Verb {
        name: "exec",
        words: "ID COMMAND [ARG...]",
        what: "run another process in a container",
        flags: &[
            CONSOLE,
            ("cwd", "", One, "working directory"),
            ("env", "e", Many, "NAME=VALUE"),
            ("tty", "t", Nothing, "with a terminal"),
            ("user", "u", One, "UID[:GID]"),
            ("additional-gids", "g", Many, "additional groups"),
            ("process", "p", One, "process.json"),
            DETACH,
            PID_FILE,
            PIDFD,
            ("process-label", "", One, "SELinux label"),
            ("apparmor", "", One, "AppArmor profile"),
            ("no-new-privs", "", Nothing, "execve gives no privileges"),
            ("cap", "c", Many, "additional capability"),
            PRESERVE,
            ("cgroup", "", Many, "[CONTROLLER:]PATH of a cgroup below the container's"),
            ("ignore-paused", "", Nothing, "wait in a paused container until it is resumed"),
            HELP,
        ],
        run: Run::With(verb::exec),
    },
    Verb {
        name: "ps",
        words: "ID [PS-OPTION...]",
        what: "list the processes of a container",
        flags: &[FORMAT, HELP],
        run: Run::With(verb::ps),
    },
    Verb {
        name: "list",
        words: "",
        what: "list containers",
        flags: &[FORMAT, ("quiet", "q", Nothing, "only their ids"), HELP],
        run: Run::With(verb::list),
    },
    Verb {
        name: "pause",
        words: "ID",
        what: "freeze all processes",
        flags: &[HELP],
        run: Run::With(verb::pause),
    },
    Verb {
        name: "resume",
        words: "ID",
        what: "resume all processes",
        flags: &[HELP],
        run: Run::With(verb::resume),
    },
    Verb {
        name: "checkpoint",
        words: "ID",
        what: "save the processes of a running container as files, and delete it",
        flags: checkpoint::CHECKPOINT,
        run: Run::With(checkpoint::checkpoint),
    },
    Verb {
        name: "restore",
        words: "ID",
        what: "make a container from a checkpoint, and wait for it",
        flags: checkpoint::RESTORE,
        run: Run::With(checkpoint::restore),
    },
    Verb {
        name: "update",
        words: "ID",
        what: "change limits",
        flags: update::FLAGS,
        run: Run::With(update::update),
    },
    Verb {
        name: "events",
        words: "ID",
        what: "print the resource use of a container until it ends",
        flags: &[
            ("interval", "", One, "time between two lines, 5s if not given"),
            ("stats", "", Nothing, "print one line"),
            HELP,
        ],
        run: Run::With(verb::events),
    },
    Verb {
        name: "spec",
        words: "",
        what: "write an initial config.json",
        flags: &[BUNDLE, ("rootless", "", Nothing, "with a user namespace"), HELP],
        run: Run::Alone(verb::spec),
    },
    Verb {
        name: "features",
        words: "",
        what: "print the supported features",
        flags: &[HELP],
        run: Run::Alone(verb::features),
    },
];
