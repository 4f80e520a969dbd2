"use strict";
function simulationPage() { return { parts: [], ready() {}, redraw() {} }; }
