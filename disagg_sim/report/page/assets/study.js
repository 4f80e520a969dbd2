"use strict";
function studyPage() { return { parts: [], ready() {}, redraw() {} }; }
