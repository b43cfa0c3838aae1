// Adds to pages that work without it: live parts, keys, and copying.
import { startLive } from "./live.js";
import { startKeys } from "./keys.js";

startLive();
startKeys();
