// Adds live updates and keys to the pages, which also work without JavaScript.
import { startLive } from "./live.js";
import { startKeys } from "./keys.js";

startLive();
startKeys();
